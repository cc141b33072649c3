"""Kills processes that convert, save a session, or move conversations to the disk, and looks at what they leave: it is
whole, or it is refused, or the next run goes on from there; and nothing stays behind for ever.

    python tests/support/kills.py --kills 1000 build/kills      1000 of each kind, or what is missing of them there
    python tests/support/kills.py --kind save --kills 50 FOLDER

Every other process is killed by the clock, anywhere; the others kill themselves at a call to the system that was chosen
by lot, before or after it was done, or with --in-turn at the first call, the second, ... Both are SIGKILL. What was
done so far is in FOLDER, so that a run can be stopped and goes on from there. The first broken promise ends it with
status 1, and FOLDER is left as it was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from golden import checkpoints  # noqa: E402
from moeflux import Sampling, Snapshot, files  # noqa: E402
from moeflux.conversion.convert import convert  # noqa: E402
from moeflux.conversion.journal import JOURNAL  # noqa: E402
from moeflux.errors import Error  # noqa: E402
from moeflux.serving import Request, Scheduler  # noqa: E402
from moeflux.stores.storage import ConvertFormat  # noqa: E402
from moeflux.stores.store import open_store  # noqa: E402
from support.engine import folders, load_faulty  # noqa: E402
from support.served import Alone, text  # noqa: E402

MODEL = "qwen3_5_moe"
CALLS = (
    "fsync",
    "ftruncate",
    "link",
    "mkdir",
    "open",
    "pwrite",
    "rename",
    "replace",
    "rmdir",
    "unlink",
    "utime",
    "write",
)
"""Of the system: what changes files."""
REPLACE = os.replace  # which is not counted
LONGEST = 60.0  # seconds, for a look at what was left


def killed_at(number: int, after: bool) -> None:
    """From now on, this process kills itself at that call, counted from 0."""
    left = itertools.count()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            last = next(left) == number
            if last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*arguments, **options)
            finally:
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def in_a_child(work: Callable[[], None]) -> int:
    """The number of a new process that does this and nothing else. Its status is 1 when that raises."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def done(work: Callable[[], None]) -> bool:
    _, status = os.waitpid(in_a_child(lambda: (signal.alarm(int(LONGEST)), work())[1]), 0)
    return status == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != JOURNAL
    }


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if files.is_partial(path)]


@dataclass
class Converting:
    """One store is replaced by the other, again and again."""

    root: Path
    seconds = 0.2
    calls = 250

    def prepare(self) -> None:
        checkpoints.write(MODEL, self.root / "hf")
        for bits in (4, 8):
            convert(self.root / "hf", self.root / f"expected-{bits}", format=ConvertFormat.asked(bits), check="none")

    def once(self, bits: int) -> None:
        (self.root / "next").write_text(str(bits))
        REPLACE(self.root / "next", self.root / "bits")
        dest = self.root / "there" / "packed"
        convert(self.root / "hf", dest, format=ConvertFormat.asked(bits), check="none", force=True)

    def work(self) -> Iterator[None]:
        for bits in itertools.cycle((4, 8)):
            self.once(bits)
            yield

    def look(self) -> None:
        there = self.root / "there"
        dest, partial, replaced = (there / f"packed{ending}" for ending in ("", ".partial", ".replaced"))
        expected = [contents(self.root / f"expected-{bits}") for bits in (4, 8)]
        if dest.exists():
            assert contents(dest) in expected, "the store is whole"
            open_store(dest).close()
        elif replaced.exists():
            assert contents(replaced) in expected and partial.exists(), "what was replaced is whole, and so is the new"
        if partial.exists() and contents(partial) not in expected:
            try:
                open_store(partial).close()
            except Error:
                pass
            else:
                raise AssertionError("a store that is not finished is refused")
        bits = int((self.root / "bits").read_text())
        self.once(bits)
        assert contents(dest) == expected[bits == 8], "the next run ends with what one run would have written"
        assert [path.name for path in there.iterdir()] == ["packed"], "nothing else is left"
        assert not (dest / JOURNAL).exists()


@dataclass
class Saving:
    """One state of a session is replaced by another in the same file, again and again."""

    root: Path
    seconds = 0.05
    calls = 40

    def prepare(self) -> None:
        session = load_faulty(folders(self.root)(MODEL)).session(max_context=1024)
        for name in ("a", "b"):
            session.prefill(text(300, seed=ord(name)))
            session.snapshot().save(self.root / f"expected-{name}")

    def snapshots(self) -> list[Snapshot]:
        with open_store(self.root / MODEL) as store:
            return [Snapshot.load(self.root / f"expected-{name}", store.variant) for name in ("a", "b")]

    def work(self) -> Iterator[None]:
        for snapshot in itertools.cycle(self.snapshots()):
            snapshot.save(self.root / "there" / "saved")
            yield

    def look(self) -> None:
        saved = self.root / "there" / "saved"
        whole = [(self.root / f"expected-{name}").read_bytes() for name in ("a", "b")]
        if saved.exists():
            assert saved.read_bytes() in whole, "the file is whole"
        assert len(left_over(saved.parent)) <= 1
        self.snapshots()[0].save(saved)
        assert saved.read_bytes() == whole[0]
        assert [path.name for path in saved.parent.iterdir()] == ["saved"], "nothing else is left"


@dataclass
class MovingToDisk:
    """Conversations move to the disk as soon as they are idle, older ones give way, and some are read again."""

    root: Path
    seconds = 0.4
    calls = 60
    quota = 300_000
    conversations = 6

    def prepare(self) -> None:
        alone = Alone(load_faulty(folders(self.root)(MODEL)))
        answers = [alone(self.request(seed))[0] for seed in range(self.conversations)]
        (self.root / "answers.json").write_text(json.dumps(answers))

    def request(self, seed: int) -> Request:
        prompt = text(60 + seed % 60, seed)
        return Request(prompt, max_tokens=4, sampling=Sampling(1.0, seed=seed), borders=[len(prompt)])

    def scheduler(self) -> Scheduler:
        model = load_faulty(self.root / MODEL)
        return Scheduler(model, disk=self.root / "there" / "states", disk_quota=self.quota, idle_seconds=0)

    def ask(self, scheduler: Scheduler, seed: int) -> None:
        expected = json.loads((self.root / "answers.json").read_text())[seed]
        assert scheduler.submit(self.request(seed)).wait().tokens == expected

    def work(self) -> Iterator[None]:
        with self.scheduler() as scheduler:
            yield
            for turn in itertools.count():  # always new ones, so that there is always something to write
                if turn % 2:
                    scheduler.submit(self.request(self.conversations + turn)).wait()
                else:
                    self.ask(scheduler, turn // 2 % self.conversations)
                yield

    def look(self) -> None:
        states = self.root / "there" / "states"
        before = {path.name for path in states.iterdir()} if states.exists() else set()
        with self.scheduler() as scheduler:
            kept = scheduler.stats.saved
            assert kept <= len(before)
            for seed in range(self.conversations):
                self.ask(scheduler, seed)
        with self.scheduler() as scheduler:
            assert scheduler.stats.saved > 0, "what is saved now is found"
        assert not left_over(states), "nothing else is left"
        assert sum(path.stat().st_size for path in states.glob("*.session")) <= self.quota


KINDS: dict[str, type[Converting | Saving | MovingToDisk]] = {
    "convert": Converting,
    "save": Saving,
    "disk": MovingToDisk,
}


def killed(kind: Converting | Saving | MovingToDisk, rng: random.Random, turn: int | None) -> None:
    """A process of this kind, from its start to its end."""
    by_clock, number, after = rng.random() < 0.5, rng.randrange(kind.calls), rng.random() < 0.5
    if turn is not None:
        by_clock, number, after = False, turn // 2, bool(turn % 2)
    ready, told = os.pipe()

    def work() -> None:
        if not by_clock:
            killed_at(number, after)
        steps = kind.work()
        next(steps)
        tell(told, b"r")
        for _ in steps:
            pass

    tell = os.write
    child = in_a_child(work)
    os.close(told)
    os.read(ready, 1)  # or its end
    os.close(ready)
    if by_clock:
        time.sleep(rng.uniform(0, kind.seconds))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"expected a kill, found {status}"


def run(name: str, folder: Path, kills: int, seed: int, in_turn: bool, say: Callable[[str], None]) -> int:
    """Returns how many there were, with those of earlier runs."""
    tally = folder / "tally"
    if not tally.exists():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "there").mkdir(parents=True)
        assert done(KINDS[name](folder).prepare)
        tally.write_text("0")
    kind, begun = KINDS[name](folder), time.monotonic()
    while (count := int(tally.read_text())) < kills:
        rng = random.Random(f"{seed} {count}")
        killed(kind, rng, count if in_turn else None)
        if (in_turn or rng.random() < 0.7) and not done(
            kind.look
        ):  # else a second process finds what the first one left
            raise SystemExit(f"{name}: broken at kill {count}, seed {seed}: see {folder}")
        tally.write_text(str(count + 1))
        if (count + 1) % 50 == 0:
            say(f"{name}: {count + 1} kills, {time.monotonic() - begun:.0f} s")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=1000, help="of each kind; 1000")
    parser.add_argument("--kind", choices=KINDS, action="append", help="one; may be repeated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--in-turn", action="store_true", help="at one call after the other, and none by the clock")
    arguments = parser.parse_args()
    for name in arguments.kind or KINDS:
        say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        count = run(name, arguments.folder / name, arguments.kills, arguments.seed, arguments.in_turn, say)
        print(f"{name}: {count} processes killed, all that they left was whole, refused or gone on with", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
