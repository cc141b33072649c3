"""What a full disk does to whoever writes: python tests/support/full_disk_child.py FOLDER, which is a disk of its own,
of a few megabytes, that nobody else needs. Somebody else fills it while a store, a session and conversations are being
written. Each is refused by an error that names the path, or does without the disk. What was there stays, nothing is
left that takes room, and with room again everything goes on, with the same bytes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from golden import checkpoints
from moeflux import IoError, files
from moeflux.conversion import convert as conversion
from moeflux.conversion.convert import convert
from moeflux.progress import Silent
from moeflux.serving import Request, Scheduler
from support.engine import folders, load_faulty
from support.kills import contents
from support.served import Alone, text

MODEL = "qwen3_5_moe"
PAGE = 4096


class Ballast:
    """Another program's file on the disk."""

    def __init__(self, disk: Path) -> None:
        self.path = disk / "ballast"

    def leave(self, free: int) -> None:
        """Fills the disk but for so many bytes."""
        with self.path.open("wb") as file:
            while (room := self.room() - free) > 0:
                with suppress(OSError):  # somebody else took room meanwhile
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, room)

    def room(self) -> int:
        status = os.statvfs(self.path.parent)
        return status.f_bavail * status.f_frsize

    def go(self) -> None:
        self.path.unlink()


class Filling(Silent):
    """Fills the disk when so many bytes are done."""

    def __init__(self, ballast: Ballast, after: int, free: int) -> None:
        self.ballast, self.after, self.free, self.done = ballast, after, free, 0

    @contextmanager
    def task(self, label: str, total: int, unit: str = "bytes") -> Iterator[Filling]:
        yield self

    def advance(self, done: int) -> None:
        before, self.done = self.done, self.done + done
        if before <= self.after < self.done:
            self.ballast.leave(self.free)


def converting(disk: Path, source: Path, expected: dict[str, bytes]) -> dict[str, int]:
    ballast, dest, counts = Ballast(disk), disk / "packed", {"refused": 0, "whole": 0, "resumed": 0}
    conversion.check_space = lambda dest, needed: None  # it had room when it was asked
    total = sum(map(len, expected.values()))
    for after in range(0, total, total // 3):
        for free in (0, PAGE, 25 * PAGE, total):
            try:
                convert(source, dest, check="none", progress=Filling(ballast, after, free))
                counts["whole"] += 1
            except IoError as error:
                assert "No space left" in str(error) and "packed.partial" in str(error), error
                assert not dest.exists()
                counts["refused"] += 1
            if ballast.path.exists():
                ballast.go()
            if not dest.exists():
                counts["resumed"] += convert(source, dest, check="none").plan.resumed > 0
            assert contents(dest) == expected
            assert sorted(path.name for path in disk.iterdir()) == ["packed"]
            shutil.rmtree(dest)
    return counts


def saving(disk: Path, store: Path) -> dict[str, int]:
    ballast, path, counts = Ballast(disk), disk / "saved", {"refused": 0, "whole": 0}
    session = load_faulty(store).session(max_context=1024)
    session.prefill(text(200, seed=1))
    before = session.snapshot()
    session.prefill(text(200, seed=2))
    after = session.snapshot()
    before.save(path)
    first, room = path.read_bytes(), path.stat().st_size
    for free in (0, PAGE, room // 2, room, 4 * room):
        ballast.leave(free)
        try:
            after.save(path)
            counts["whole"] += 1
        except IoError as error:
            assert str(error) == f"{path}: No space left on device; the file that was there is kept", error
            assert path.read_bytes() == first
            counts["refused"] += 1
        assert sorted(each.name for each in disk.iterdir()) == ["ballast", "saved"]
        ballast.go()
    after.save(path)
    session.restore(path)
    path.unlink()
    return counts


def moving(disk: Path, store: Path) -> dict[str, int]:
    """The disk is full, or becomes so."""
    ballast, counts = Ballast(disk), {"saved": 0, "not saved": 0}
    alone = Alone(load_faulty(store))
    requests = [
        Request(prompt, max_tokens=4, borders=[len(prompt)]) for prompt in (text(100, seed=seed) for seed in range(6))
    ]
    for free in (0, PAGE, 20 * PAGE, 1 << 22):
        with Scheduler(load_faulty(store), disk=disk / "states", idle_seconds=0) as scheduler:
            ballast.leave(free)
            for request in requests:
                answer = scheduler.submit(request).wait()
                assert (answer.tokens, answer.finish) == alone(request)
            assert scheduler.stats.failed == 0
        left = list((disk / "states").iterdir())
        assert not any(map(files.is_partial, left)), left
        with Scheduler(load_faulty(store), disk=disk / "states") as scheduler:
            saved = scheduler.stats.saved
            assert saved == len(left) - 1, "each is whole; the key is not one"
        counts["saved"] += saved
        counts["not saved"] += len(requests) - min(saved, len(requests))
        ballast.go()
        shutil.rmtree(disk / "states")
    return counts


def main() -> None:
    logging.disable(logging.WARNING)
    disk = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as other:
        source, store = checkpoints.write(MODEL, Path(other) / "hf"), folders(Path(other))(MODEL)
        convert(source, Path(other) / "expected", check="none")
        counts = {
            "convert": converting(disk, source, contents(Path(other) / "expected")),
            "save": saving(disk, store),
            "disk": moving(disk, store),
        }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
