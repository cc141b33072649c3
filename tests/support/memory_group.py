"""A control group with a memory limit for a child process, where the system lets us make one."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class MemoryGroup:
    folder: Path
    limit_file: str

    def command(self, argv: list[str]) -> list[str]:
        """The same, begun inside the group, so that all of its memory is counted there."""
        return ["/bin/sh", "-c", f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"', "sh", *argv]

    def limit(self, size: int) -> None:
        (self.folder / self.limit_file).write_text(str(size))

    def killed(self) -> int:
        """Processes that the system ended for their memory."""
        for name in ("memory.events", "memory.oom_control"):
            file = self.folder / name
            if file.exists():
                fields = dict(line.split() for line in file.read_text().splitlines())
                return int(fields.get("oom_kill", 0))
        return 0


def _parents() -> Iterator[tuple[Path, str]]:
    """Folders in which a group may be made, with the name of the file of its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            yield from ((place, "memory.limit_in_bytes") for place in (root / own.lstrip("/"), root))
        elif not controllers:
            # Groups with processes can have no children with a limit: those above this one may.
            place = Path("/sys/fs/cgroup") / own.lstrip("/")
            yield from (
                (each, "memory.max") for each in (place, *place.parents) if each.is_relative_to("/sys/fs/cgroup")
            )


@contextmanager
def memory_group() -> Iterator[MemoryGroup | str]:
    """A group, or why there is none."""
    reason = "no memory control group is mounted"
    try:
        parents = list(_parents())
    except OSError as error:
        yield f"no control groups: {error}"
        return
    for parent, limit_file in parents:
        folder = parent / f"moeflux-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir()
        except OSError as error:
            reason = f"no control group can be made: {error}"
            continue
        try:
            if not (folder / limit_file).exists():
                reason = f"{parent}: its groups have no memory limit"
                continue
            yield MemoryGroup(folder, limit_file)
            return
        finally:
            while (folder / "cgroup.procs").read_text():  # children of what was ended there see it in a moment
                time.sleep(0.01)
            folder.rmdir()
    yield reason
