"""Threads still at work when the interpreter ends: the process ends as it would without them. Each is a child."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.engine import Folder, folders

# What a daemon thread does over and over, until the process is gone.
WORK = {
    "prefill": "session.clear(); session.prefill(tokens(200))",
    "a prefill that tells": "session.clear(); session.prefill(tokens(200), lambda done, total: sum(range(99)))",
    "steps": "session.rewind(5); session.step(1)",
    "top_k": "session._logits().top_k(100)",
    "logits": "session._logits().numpy()",
    "cancelled": "cancel = Cancel(); cancel.set(); suppressed(lambda: session.prefill([1], cancel=cancel))",
    "load": "load(on_progress=lambda done, total: None)",
    "open": "moeflux.open_store(sys.argv[1])",
    "snapshots": "session.restore(session.snapshot())",
    "checked reads": "checked()",
}
CHILD = """
    import sys, threading
    import moeflux
    from moeflux import Cancel, _core

    def load(**options):
        return moeflux.load(sys.argv[1], threads=2, readers=2, chunk=16, **options)

    def tokens(count):
        return list(range(count))

    def suppressed(call):
        try:
            call()
        except moeflux.Error:
            pass

    def checked():
        experts = _core.Experts(store.directory, slots=4, threads=2, check=lambda layer, expert, data: True)
        for expert in range(16):
            lease, found = experts.demand(1, expert)
            experts.wait(lease)
            lease.release()

    store = moeflux.open_store(sys.argv[1])
    session = load().session()
    session.prefill(tokens(5))
    begun = threading.Event()

    def work():
        while True:
            {work}
            begun.set()

    threading.Thread(target=work, daemon=True).start()
    begun.wait()
    print("the end")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("end"))


def ended(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The time limit is for what hangs."""
    command = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(script), *map(str, arguments)]
    root = Path(__file__).parents[1]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("work", WORK)
def test_a_daemon_thread_at_work(folder: Folder, work: str) -> None:
    done = ended(CHILD.replace("{work}", WORK[work]), folder("qwen3_moe"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


def test_a_daemon_thread_that_writes_text() -> None:
    script = """
        import threading
        import moeflux

        session = moeflux.load(moeflux.builtin.path(), threads=2).session()
        begun = threading.Event()

        def work():
            while True:
                for piece in session.generate("Once upon a time", max_tokens=20):
                    begun.set()

        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        print("the end")
    """
    done = ended(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


def test_exceptions_and_exits_end_it_too(folder: Folder) -> None:
    """With work under way: an error in the main thread has its own status, and sys.exit its own."""
    for ending, status in (("raise SystemExit(3)", 3), ("raise ValueError('mine')", 1)):
        script = CHILD.replace("{work}", WORK["prefill"]).replace('print("the end")', ending)
        done = ended(script, folder("qwen3_moe"))
        assert done.returncode == status and "terminate" not in done.stderr and "Fatal" not in done.stderr


def test_the_package_has_no_other_way_to_the_interpreter() -> None:
    """Guards of pybind11's own abort a thread that is ended in them, and its own classes free objects twice."""
    python = Path(__file__).resolve().parents[2] / "csrc" / "python"
    for file in sorted(python.glob("*")):
        text = file.read_text()
        assert "gil_scoped" not in text, file
        assert "reference_internal" not in text, file
        if file.name != "class.h":
            assert "py::class_<" not in text and "py::init<" not in text and "py::init()" not in text, file
