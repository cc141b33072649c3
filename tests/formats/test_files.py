"""The one way to open files: nothing hangs, nothing is read beyond a limit, and no other module opens any."""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from moeflux import FormatError, IoError, files
from moeflux.errors import ArgumentError, Error
from support.hostile_paths import ANSWERS, HOSTILE, NO_PATHS, impatience

__all__ = ["impatience"]  # a fixture, for every test here

PACKAGE = Path(moeflux.__file__).parent

# ---- No other module touches the file system --------------------------------------------------------------------

# Of Path, of os, of shutil, of NumPy and of the libraries that open files themselves.
FORBIDDEN = frozenset(
    """
    open read_text read_bytes write_text write_bytes fromfile tofile memmap from_file load_from_file
    exists is_file is_dir is_symlink is_fifo stat lstat glob rglob iterdir mkdir makedirs touch unlink rmdir rmtree
    resolve expanduser expandvars samefile readlink symlink_to hardlink_to listdir scandir walk statvfs disk_usage
    mkstemp mkdtemp TemporaryFile NamedTemporaryFile copyfile copytree move read_history_file write_history_file
    """.split()
)
OF_OS = frozenset({"replace", "rename", "remove", "access", "link", "truncate", "mkfifo"})
OF_JSON = frozenset({"load", "loads"})
OF_NUMPY = frozenset({"load", "save", "savez", "loadtxt", "genfromtxt", "savetxt"})
OF_CORE = frozenset({"read_json", "parse_json"})

ALLOWED = {
    # Written by doctor itself a moment before, in a folder that was checked; most have no name.
    ("measure/doctor.py", "TemporaryFile"),
    ("measure/doctor.py", "NamedTemporaryFile"),
    # A field of a probe: the bytes of a read.
    ("measure/doctor.py", "read_bytes"),
    # A program of its own without a module of ours; it reads of itself in /proc, and what its parent sends.
    ("text/renderer.py", "open"),
    ("text/renderer.py", "loads"),
    ("text/encoder.py", "loads"),
    # Of the system's own /dev/null.
    ("__main__.py", "open"),
    ("cli/__init__.py", "open"),
    # An address, not a file.
    ("cli/launch.py", "open"),
    # Keys of one run, written a moment before they are read, in a folder of this process.
    ("cluster/links.py", "open"),
    # No files: what a model has written, which must be forgiven much, or what the server has written itself.
    ("serve/front.py", "loads"),
    ("serve/lark.py", "loads"),
    ("serve/messages.py", "loads"),
    ("serve/prompt.py", "loads"),
    ("serve/replay.py", "loads"),
    ("serve/response_stream.py", "loads"),
    ("serve/tools/values.py", "loads"),
    ("serve/tools/written.py", "loads"),
}


def uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of everything in a module that opens, looks at or changes what is on the disk."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "open":
            yield node.lineno, "open"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                by_module = {"os": OF_OS, "json": OF_JSON, "moeflux._core": OF_CORE, "numpy": OF_NUMPY}
                foreign = module.split(".")[0] in ("os", "shutil", "tempfile", "pathlib", "io")
                if alias.name in by_module.get(module, ()) or (foreign and alias.name in FORBIDDEN):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute):
            of = {"os": OF_OS, "json": OF_JSON, "np": OF_NUMPY, "_core": OF_CORE}
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner == "files":
                continue
            if node.attr in FORBIDDEN or node.attr in of.get(owner, ()):
                yield node.lineno, node.attr


def test_no_other_module_touches_the_file_system() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name != "files.py":
            found += [f"{name}:{line}: {use}" for line, use in uses(path.read_text()) if (name, use) not in ALLOWED]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "open('x')", "with open('x') as file: pass", "Path('x').open()", "os.open('x', 0)", "Path('x').read_text()",
        "path.read_bytes()", "np.fromfile('x')", "np.load('x')", "json.loads(text)", "_core.read_json('x')",
        "from moeflux._core import read_json", "from os import replace", "os.replace('a', 'b')", "path.exists()",
        "tokenizers.Tokenizer.from_file('x')", "function = path.read_text", "from shutil import rmtree",
    ],
)  # fmt: skip
def test_the_rule_sees_every_way(line: str) -> None:
    assert list(uses(line))


def test_the_rule_leaves_the_rest_alone() -> None:
    assert not list(uses("'a'.replace('b', 'c'); files.exists('x'); dataclasses.replace(x); rename('a')"))


# ---- What lies at a path ----------------------------------------------------------------------------------------


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("grün".encode())
    assert files.read_text(path) == "grün"
    assert files.read_bytes(path, 5) == path.read_bytes()
    with pytest.raises(FormatError, match=re.escape(f"{path}: expected at most 4 bytes, found 5")):
        files.read_bytes(path, 4)
    path.write_bytes(b"a\xff")
    with pytest.raises(FormatError, match="expected UTF-8, found byte 1 to be none"):
        files.read_text(path)
    with pytest.raises(IoError, match="none: cannot be opened: No such file"):
        files.read_bytes(tmp_path / "none")


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_path_with_something_else_at_it(tmp_path: Path, kind: str) -> None:
    make, words = HOSTILE[kind]
    path = make(tmp_path / "x")
    with pytest.raises(FormatError, match=f"x: .*({words})"):
        files.read_bytes(path)
    if kind != "huge":
        with pytest.raises(FormatError, match=f"x: .*({words})"):
            files.expect_folder(path) if kind != "a directory" else files.open_to_write(path)
        with pytest.raises(FormatError, match="expected a file to replace, or nothing, found a"):
            files.write_atomically(path, [b"x"])


@pytest.mark.parametrize("call", ["files.open_file", "_core.read_json"])
def test_a_terminal_does_not_become_the_process_own(call: str) -> None:
    """As it would of a daemon, which leads a session without one: the end of the terminal would be its end too."""
    code = f"""
import os
from moeflux import FormatError, _core, files
os.setsid()
_, terminal = os.openpty()
try:
    {call}(os.ttyname(terminal))
except FormatError as error:
    print("found a device" in str(error))
try:
    os.open("/dev/tty", os.O_RDONLY)
except OSError:
    print("none")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "none"]


@pytest.mark.parametrize("name", NO_PATHS)
@pytest.mark.parametrize(
    "call",
    [
        files.open_file, files.read_json, files.kind_of, files.is_folder, files.expect_folder, files.size_of,
        files.open_to_write, files.make_folder, lambda path: files.write_atomically(path, [b"x"]),
    ],
)  # fmt: skip
def test_what_can_be_no_path(name: str, call: Callable[[str], Any], tmp_path: Path) -> None:
    """One error of ours with a short name in it; or, where that is the answer, "nothing"."""
    path = NO_PATHS[name] if name in ("NUL", "nothing") else f"{tmp_path}/none/{NO_PATHS[name]}"
    try:
        assert call(path) in ANSWERS
    except Error as error:
        assert len(str(error)) < 400
    assert not (tmp_path / "none").is_file()


@pytest.mark.parametrize("wrong", [None, 3, b"bytes", ["a"]])
def test_what_is_no_path_at_all(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="path: expected text or a Path, found"):
        files.path_of(wrong)


def test_a_folder_that_may_not_be_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refused)
    for call in (files.exists, files.is_file, files.size_of, files.expect_folder):
        with pytest.raises(IoError, match="/x: Permission denied"):
            call("/x")


def test_too_little_memory_is_an_error_of_ours() -> None:
    with pytest.raises(IoError, match="x: expected memory"), files.system_errors("x"):
        raise MemoryError


# ---- Writing ----------------------------------------------------------------------------------------------------


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, [b"one ", np.frombuffer(b"two", np.uint8)])
    assert path.read_bytes() == b"one two"
    files.write_atomically(path, [b"three"])
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"three"


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o640)])
def test_who_may_read_it(tmp_path: Path, private: bool, mode: int) -> None:
    path = tmp_path / "file"
    path.touch(0o666)
    mask = os.umask(0o027)
    try:
        files.write_atomically(path, [b"x"], private=private)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_no_link_is_followed(tmp_path: Path) -> None:
    """Neither where the file is written first, nor where it goes."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("file", "file.partial"):
        (tmp_path / name).symlink_to(precious)
    files.write_atomically(tmp_path / "file", [b"x"])
    assert precious.read_text() == "mine"
    assert (tmp_path / "file").read_bytes() == b"x" and not (tmp_path / "file").is_symlink()
    with pytest.raises(FormatError, match="found a symbolic link"):
        files.open_to_write(tmp_path / "file.partial")


def failing(error: BaseException) -> Iterator[bytes]:
    yield b"begun"
    raise error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), IoError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), IoError),
    ],
)
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, error: BaseException, expected: type[BaseException]
) -> None:
    path = tmp_path / "file"
    for before, kept in ((None, "nothing was written"), (b"before", "the file that was there is kept")):
        if before is not None:
            path.write_bytes(before)
        with pytest.raises(expected) as caught:
            files.write_atomically(path, failing(error))
        if isinstance(error, OSError):
            assert str(caught.value) == f"{path}: No space left on device; {kept}"
        assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_disk_that_is_full() -> None:
    """A limit on the length of files is as good as a disk: the system refuses in the midst of a write."""
    code = """
import resource, sys, tempfile
from pathlib import Path
from moeflux import IoError, files
path = Path(tempfile.mkdtemp()) / "file"
path.write_bytes(b"before")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    files.write_atomically(path, [bytes(1 << 19)] * 3)
except IoError as error:
    print(str(error).removeprefix(str(path)))
print(path.read_bytes(), [each.name for each in path.parent.iterdir()])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [": File too large; the file that was there is kept", "b'before' ['file']"]


WRITER = """
import sys
from moeflux import files

def chunks():
    yield b"begun"
    print("begun", flush=True)
    sys.stdin.readline()

files.write_atomically(sys.argv[1], chunks())
"""


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    """And what is still being written stays."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / name)], **pipes) for name in ("a", "b")]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
    assert len(list(tmp_path.iterdir())) == 2 and all(map(files.is_partial, tmp_path.iterdir()))
    writers[0].kill()
    writers[0].communicate()
    files.write_atomically(tmp_path / "c", [b"x"])
    assert len(list(filter(files.is_partial, tmp_path.iterdir()))) == 1
    writers[1].communicate("\n")
    assert writers[1].returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]


def test_one_that_is_swept_before_it_is_locked_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    locked, swept = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        locked(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    files.write_atomically(tmp_path / "file", [b"x"])
    assert len(swept) == 1 and (tmp_path / "file").read_bytes() == b"x"


def test_a_folder_goes_before_what_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for name in ("a", "journal", "z", "inner/b"):
        (folder / name).touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (folder / "link").symlink_to(outside)
    with monkeypatch.context() as stopped:
        stopped.setattr(files.shutil, "rmtree", lambda path: None)  # the process ends there
        files.remove_folder(folder, last=["journal"])
    assert sorted(path.name for path in folder.iterdir()) == ["inner", "journal"]
    files.remove_folder(folder, last=["journal"])
    assert not folder.exists() and (outside / "precious").exists()
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(IoError):
        files.remove_folder(tmp_path / "link", last=[])
    assert (outside / "precious").exists()


def test_savers_to_one_path(tmp_path: Path) -> None:
    """Each writes the whole file; the last one's stays. Threads here, which share even the process's number."""
    path, contents = tmp_path / "file", [bytes([letter]) * 300_000 for letter in b"abc"]
    start = threading.Barrier(len(contents))

    def save(content: bytes) -> None:
        start.wait()
        for _ in range(20):
            files.write_atomically(path, [content[:150_000], content[150_000:]])
            assert path.read_bytes() in contents

    errors: list[BaseException] = []

    def guarded(content: bytes) -> None:
        try:
            save(content)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_folder_is_synced_behind_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the name could be lost with the power, after the call said that it was done."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noting_replace(source: Path, to: Path) -> None:
        done.append("rename")
        replace(source, to)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    files.write_atomically(tmp_path / "file", [b"x"])
    assert done == ["file", "rename", "folder"]
