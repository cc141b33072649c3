"""The models that are here and those that are known by name, with what each needs: the content of `moeflux models`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeflux import files
from moeflux.errors import Error
from moeflux.machine.memory import available
from moeflux.measure.info import describe
from moeflux.models.hub import download_folder, downloads
from moeflux.models.presets import PRESETS
from moeflux.runtime.plan import plan
from moeflux.sizes import size_text

__all__ = ["Known", "KnownModels", "known_models"]


@dataclass(frozen=True)
class Known:
    """Sizes are bytes."""

    name: str
    folder: str  # empty for a preset
    disk_bytes: int  # of its weights; of a preset, in 4 bits
    least_bytes: int  # the least budget of memory, with one session of a short context
    full_bytes: int  # the budget with which every expert stays in memory
    why_not: str = ""  # it does not run here; empty: it does

    def cells(self) -> list[str]:
        sizes = [size_text(size) if size else "" for size in (self.disk_bytes, self.least_bytes, self.full_bytes)]
        return [self.name, *sizes, self.why_not or "yes"]


@dataclass(frozen=True)
class Free:
    """Bytes."""

    memory: int
    disk: int  # where downloads go


@dataclass(frozen=True)
class KnownModels:
    free: Free
    downloaded: list[Known]
    presets: list[Known]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        memory, disk = size_text(self.free.memory), size_text(self.free.disk)
        none = ["  none; `moeflux run owner/name` downloads a model"]
        return "\n".join([
            f"free here: {memory} of memory, {disk} of disk for downloads", "",
            "downloaded:", *(_table(self.downloaded) if self.downloaded else none), "",
            "known by name, in 4 bits:", *_table(self.presets), "",
            "With all in memory, a session has room for 32768 tokens. `moeflux plan NAME` tells more.",
        ])  # fmt: skip


def known_models() -> KnownModels:
    free = Free(available().bytes, files.free_bytes(download_folder()))
    here = [_downloaded(name, folder, free) for name, folder in downloads()]
    return KnownModels(free, here, [_known(name, name, "", free) for name in PRESETS])


def _downloaded(name: str, folder: Path, free: Free) -> Known:
    """Whatever is wrong with one must not hide the others."""
    try:
        return _known(name, folder, str(folder), free)
    except Error as error:
        return Known(name, str(folder), 0, 0, 0, f"no: {error}")


def _known(name: str, target: str | Path, folder: str, free: Free) -> Known:
    info, planned = describe(target), plan(target, memory=None)
    disk = info.dense_bytes + info.routed_bytes + info.table_bytes
    if info.kind == "hf":
        why_not = "no: convert it first"
    elif planned.least_bytes > free.memory:
        why_not = "no: too little memory is free"
    elif not folder and disk > free.disk:
        why_not = "no: too little of the disk is free"
    else:
        why_not = ""
    return Known(name, folder, disk, planned.least_bytes, planned.total_bytes, why_not)


def _table(models: list[Known]) -> list[str]:
    rows = [["", "on disk", "least memory", "all in memory", "runs here"], *(model.cells() for model in models)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"  {row[0]:<{widths[0]}}  {'  '.join(f'{row[i]:>{widths[i]}}' for i in (1, 2, 3))}  {row[4]}" for row in rows
    ]
