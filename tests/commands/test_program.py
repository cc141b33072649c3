"""The command as a process: standard streams that are closed, and Ctrl-C at any time from start to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeflux import builtin

MOEFLUX = [sys.executable, "-m", "moeflux"]


def called(*argv: str, closed: tuple[int, ...] = (), **options: object) -> subprocess.CompletedProcess[bytes]:
    """With some of the standard streams closed, and a pipe for each of the others."""

    def close() -> None:
        for number in closed:
            os.close(number)

    return subprocess.run(
        [*MOEFLUX, *argv], capture_output=True, check=False, timeout=900, preexec_fn=close, **{"input": b"", **options}
    )


# ---- Streams that are closed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "closed"),
    [
        (["info"], (1,)),
        (["info"], (0, 1)),
        (["--help"], (1,)),
        (["--version"], (0, 1)),
        (["run", "-p", "x", "-n", "1"], (0, 1)),
    ],
)
def test_a_closed_stdout_is_a_line(argv: list[str], closed: tuple[int, ...]) -> None:
    run = called(*argv, closed=closed)
    name = f"moeflux {argv[0]}" if not argv[0].startswith("-") else "moeflux"
    assert (run.returncode, run.stderr.decode()) == (2, f"{name}: stdout: Bad file descriptor\n")


@pytest.mark.parametrize("argv", [["run"], ["run", "-f", "-"], ["chat"]])
def test_a_closed_stdin_is_a_line_where_it_is_read(argv: list[str]) -> None:
    run = called(*argv, closed=(0,))
    assert (run.returncode, run.stdout) == (2, b"")
    assert run.stderr.decode() == f"moeflux {argv[0]}: stdin: Bad file descriptor\n"


def test_a_closed_stdin_is_nothing_where_it_is_not_read() -> None:
    assert called("info", closed=(0,)).returncode == 0


def test_nobody_hears_a_closed_stderr() -> None:
    run = called("run", "--raw", "-p", "Once upon a", "-n", "1", "--temperature", "0", "--stats", closed=(0, 2))
    assert (run.returncode, run.stdout) == (0, b" time\n")
    run = called("info", "/nowhere", closed=(2,))
    assert (run.returncode, run.stdout) == (2, b"")
    assert called("info", closed=(0, 1, 2)).returncode == 2


def test_a_file_of_ours_takes_no_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Otherwise printed text would be written into the file."""
    argv = ["synth", str(tmp_path / "tiny"), "--variant", "a3b", "--layers", "1", "--experts", "2"]
    run = called(*argv, "--experts-per-token", "1", "--vocab", "64", closed=(0, 1, 2))
    assert run.returncode == 2  # the report went nowhere
    assert called("verify", str(tmp_path / "tiny")).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(("argv", "unbuffered"), [(["info"], ""), (["info", "--json"], "1"), (["--help"], "")])
def test_a_full_disk_is_a_line(argv: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            [*MOEFLUX, *argv],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert run.returncode == 2 and run.stderr.endswith(b"No space left on device\n")
    assert run.stderr.count(b"\n") == 1


# ---- Ctrl-C -----------------------------------------------------------------------------------------------------

INTERRUPTED = """\
import atexit, os, signal, sys
place, sys.argv = sys.argv[1], ["moeflux", *sys.argv[2:]]
def press(name, path=None, target=None):
    if name == place:
        os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, type("Finder", (), {"find_spec": staticmethod(press)}))
atexit.register(press, "the end")
from moeflux.__main__ import program
sys.exit(program())
"""


def interrupted(place: str, *argv: str) -> tuple[int, str]:
    """Status and stderr of a command line, with Ctrl-C pressed where the module of that name is imported."""
    run = subprocess.run([sys.executable, "-c", INTERRUPTED, place, *argv], capture_output=True, text=True, check=False)
    return run.returncode, run.stderr


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("moeflux.cli", "moeflux: interrupted\n"),
        ("argparse", "moeflux: interrupted\n"),
        ("moeflux._core", "moeflux: interrupted\n"),
        ("moeflux.runtime.plan", "moeflux plan: interrupted\n"),
        ("numpy", "moeflux plan: interrupted\n"),
        ("numpy._core.multiarray", "moeflux plan: interrupted\n"),
        ("moeflux.stores.store", "moeflux plan: interrupted\n"),
    ],
)
def test_ctrl_c_while_it_starts_is_a_line(place: str, said: str) -> None:
    assert interrupted(place, "plan", str(builtin.path())) == (130, said)


def test_ctrl_c_at_the_end_changes_nothing() -> None:
    assert interrupted("the end", "info") == (0, "")
    assert interrupted("the end", "info", "/nowhere")[0] == 2


def test_an_error_that_an_interrupted_import_became_is_no_other() -> None:
    for chain in ("raise ImportError from error", "raise ImportError"):
        program = f"""
import sys, types
from moeflux import __main__
sys.modules["moeflux.cli"] = cli = types.ModuleType("moeflux.cli")
def main():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        {chain}
cli.main = main
sys.exit(__main__.program())
"""
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (130, "moeflux: interrupted\n")


def test_importing_the_package_is_nothing_to_wait_for() -> None:
    """The package imports nothing until a name is asked for. So before the command can catch a Ctrl-C, there is hardly
    anything that one could interrupt."""
    program = "import sys; from moeflux import __main__; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    ours = [name for name in run.stdout.split() if name.split(".")[0] in ("moeflux", "numpy")]
    assert ours == ["moeflux", "moeflux.__main__"]


def test_a_gpu_is_opened_while_what_loads_is_imported() -> None:
    program = """
import sys, threading
import moeflux
load, begun, main = moeflux.load, [], threading.main_thread()
print("moeflux.model" in sys.modules)
from moeflux import _core
real = _core.held_device
def held_device(backend, device):
    begun.append((threading.current_thread() is main, backend, device))
    return real("cpu", 0)
_core.held_device = held_device
for options in ({"backend": "cpu"}, {}):
    load(threads=1, **options).close()
    for thread in threading.enumerate():
        if thread is not main:
            thread.join()
    print(*sorted(begun))
    begun.clear()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = ["False", "(True, 'cpu', 0)", "(False, 'auto', 0) (True, 'auto', 0)"]
    assert run.stdout.splitlines() == found
