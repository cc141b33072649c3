"""What two stages bring where links take longer: python bench/peers/delayed.py [FOLDER] [--rounds 2], as root

Three network namespaces of this machine stand for three machines with a node of Ray on each. The first asks, the others
have layers, and a process carries the packets between them after as long as one likes (tests/support/namespaces.py; the
netem of Linux is not needed). FOLDER is a store; without it, the built-in model. Each stage has one thread.

Each row has, for a delay of a packet and so many sessions, the tokens a second of one stage and of two, in turns, their
ratio, and what the model of docs/cluster.md says of both: sessions / (time in which all get a token without delays +
delays on its way). A token's way has two delays with one stage, and three with two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import stages

from moeflux import builtin
from moeflux.cluster.machines import machines_of
from moeflux.cluster.model import ClusterModel, load_over
from moeflux.runtime.options import resolved

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.namespaces import ENTRY, Net, address, net, ray_nodes, why_not  # noqa: E402

DELAYS = (0.0, 0.0005, 0.001, 0.005)
SESSIONS = (1, 2, 4, 8)


def described(count: int) -> dict[str, object]:
    """The file of so many machines beside the one that asks, which is connected to Ray already."""
    machines = [
        {"name": name, "node": address(number), "address": address(number)}
        for number, name in ((1, "b"), (2, "c"))[:count]
    ]
    return {"address": address(0), "machines": machines}


def measure(folder: Path, head: str, files: list[Path], rounds: int) -> None:
    """In the first machine. Whoever started it sets the delay that a line of it asks for."""
    import ray

    def loaded(file: Path) -> ClusterModel:
        return load_over(folder, machines_of(file), resolved({**stages.OPTIONS}))

    ray.init(address=head, logging_level="ERROR", log_to_driver=False)
    one, two = map(loaded, files)
    fastest: dict[tuple[int, int], float] = {}
    for delay in DELAYS:
        print(json.dumps({"delay": delay}), flush=True)
        input()
        for sessions in SESSIONS:
            first, second, ratios = stages.turns(
                rounds, lambda n=sessions: stages.rate(one, n), lambda n=sessions: stages.rate(two, n)
            )  # fmt: skip
            if not delay:
                fastest[1, sessions], fastest[2, sessions] = first, second
            said = [sessions / (sessions / fastest[count, sessions] + (count + 1) * delay) for count in (1, 2)]
            values = {"one": first, "two": second, "ratio": ratios[len(ratios) // 2]}
            stages.show("delay", seconds=delay, sessions=sessions, **values, model_one=said[0], model_two=said[1])
    two.close()
    one.close()
    ray.shutdown()


def run(machines: Net, head: str, words: list[str], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{count}.json" for count in (1, 2)]
        for count, file in enumerate(files, 1):
            file.write_text(json.dumps(described(count)))
        command = [sys.executable, __file__, *words, "--rounds", rounds, "--measure", head, *files]
        child = subprocess.Popen(
            machines.within(0, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENTRY},
        )
        assert child.stdout is not None and child.stdin is not None
        for line in child.stdout:
            asked = json.loads(line)
            if "row" in asked:
                print(line, end="", flush=True)
            else:
                machines.tell(f"delay {asked['delay']}")
                print(file=child.stdin, flush=True)
        if child.wait():
            sys.exit(f"the program that measures ended with {child.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=builtin.path())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        head, *files = arguments.measure
        measure(arguments.folder, head, [Path(file) for file in files], arguments.rounds)
        return
    reason = why_not()
    if reason is not None:
        sys.exit(f"network namespaces: {reason}")
    with net(3) as machines, ray_nodes(machines) as head:
        run(machines, head, [str(arguments.folder)], arguments.rounds)


if __name__ == "__main__":
    main()
