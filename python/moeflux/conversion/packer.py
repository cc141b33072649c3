"""Writes a packed store. Several threads make its pieces, which are checksummed on the way and entered in a journal.

The store grows in DEST.partial. A piece is a dense matrix or a run of experts; each is written once, where it stays.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import files, progress
from moeflux._core import ExpertFormats, ExpertLayout
from moeflux.conversion.journal import JOURNAL, Journal, check_binding, read_lines
from moeflux.errors import FormatError, StateError, refusals
from moeflux.models.variants import Variant
from moeflux.stores import packed
from moeflux.stores.packed import DenseTensor, Description

__all__ = ["Content", "DenseUnit", "Packer", "binding", "companions", "worker_count"]

GROUP_BYTES = 32 << 20  # of experts that are made, hashed and written as one piece
SYNC_BYTES = 256 << 20  # written between two syncs: the most that a kill may cost
SYNC_SECONDS = 5.0
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class DenseUnit:
    """Dense tensors that are made together: one tensor, or the weight, scales and biases of one matrix."""

    key: str
    tensors: tuple[DenseTensor, ...]
    produce: Callable[[], Iterator[tuple[np.ndarray, ...]]]  # the next bytes (1-D uint8) of each tensor, in order
    position: tuple[int, int] = (0, 0)  # where its source begins: file, byte

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)


@dataclass(frozen=True)
class Content:
    """All that a packed store will hold, and how to get it."""

    variant: Variant
    source: dict[str, Any]  # kind, path, dropped, as in moeflux.json
    binding: dict[str, Any]  # what a resumed run must have in common with the first
    experts: ExpertFormats
    dense: list[DenseUnit]
    # (layer, first, count) -> their bytes, 1-D uint8, valid until the same thread asks again
    read_experts: Callable[[int, int, int], np.ndarray]
    layer_position: Callable[[int], tuple[int, int]] = lambda layer: (0, layer)
    copies: list[Path] = field(default_factory=list)  # small files to copy beside the weights, under their own names
    texts: dict[str, str] = field(default_factory=dict)  # more small files: name -> content
    close: Callable[[], None] = lambda: None  # gives back what reading holds
    layout: ExpertLayout = field(init=False)
    placed: dict[str, DenseTensor] = field(init=False)  # by name, in the order of model_weights.bin

    def __post_init__(self) -> None:
        v, formats = self.variant, self.experts
        layout = ExpertLayout(v.hidden_size, v.experts.intermediate, formats.gate, formats.up, formats.down)
        object.__setattr__(self, "layout", layout)
        tensors = [tensor for unit in self.dense for tensor in unit.tensors]
        object.__setattr__(self, "placed", packed.place_tensors(tensors))

    @property
    def layer_bytes(self) -> int:
        return self.layout.bytes * self.variant.experts.count

    @property
    def dense_bytes(self) -> int:
        return packed.end_of(self.placed)

    @property
    def expert_bytes(self) -> int:
        return self.layer_bytes * len(self.variant.moe_layers)

    def data_files(self) -> dict[str, int]:
        """The large files of the store and their lengths."""
        lengths = {packed.WEIGHTS: self.dense_bytes}
        for layer in self.variant.moe_layers:
            lengths[f"{packed.EXPERTS_DIRECTORY}/{packed.layer_file(layer)}"] = self.layer_bytes
        return lengths


COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.jinja",
)  # fmt: skip


def companions(folder: Path) -> list[Path]:
    """The small files of a model folder that belong beside the weights."""
    return [folder / name for name in COMPANIONS if files.is_file(folder / name)]


def binding(folder: Path, shards: Sequence[str | Path], storage: str) -> dict[str, Any]:
    """What identifies a conversion: the format, and the source's files by name, size and time (not place)."""
    config = folder / "config.json"
    return {
        "journal": 2,  # changes whenever the same source would give other tensors
        "format": storage,
        "config.json": hashlib.sha256(files.read_bytes(config)).hexdigest(),
        "files": [[Path(shard).name, *files.size_and_time(shard)] for shard in shards],
    }


@dataclass
class Piece:
    """A finished piece: its journal entry, and the files that must be synced before the entry may be written."""

    entry: dict[str, Any]
    bytes: int
    file: str


class Stopped(Exception):
    """Inside a worker: another piece failed or the user pressed Ctrl-C."""


class Packer:
    """One conversion into `folder` (DEST.partial). `resumed` is how many bytes an earlier run left there."""

    def __init__(self, content: Content, folder: Path, workers: int | None = None) -> None:
        self.content = content
        self.folder = folder
        self.workers = workers or worker_count()
        self.tensor_sums: dict[str, str] = {}
        self.expert_sums: dict[int, dict[int, str]] = {layer: {} for layer in content.variant.moe_layers}
        self.resumed = 0
        self.journal: Journal | None = None
        self._stop = threading.Event()
        self._unsynced: list[Piece] = []
        self._last_sync = time.monotonic()

    # ---- Before ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Creates the folder and its files at their full length, or takes up what an earlier run left."""
        content = self.content
        files.make_folder(self.folder)
        self.journal = Journal(self.folder, content.binding)  # before all else: without it the folder is a stranger's
        files.make_folder(self.folder / packed.EXPERTS_DIRECTORY)
        for entry in self.journal.done:
            self.resumed += self._recall(entry)
        for name, size in content.data_files().items():
            path = self.folder / name
            if self.resumed and files.exists(path) and (found := files.size_of(path)) != size:
                raise StateError(f"{path}: expected {size} bytes, found {found}; use force to start over")
            with _Writing(path) as descriptor:
                os.ftruncate(descriptor, size)

    def peek(self) -> int:
        """Bytes that an earlier run of this conversion left, without touching anything."""
        lines, _ = read_lines(self.folder / JOURNAL)
        check_binding(self.folder, lines, self.content.binding)
        return sum(self._recall(entry) for entry in lines[1:])

    def _recall(self, entry: dict[str, Any]) -> int:
        """Counts the piece of a journal line as done. Returns its bytes."""
        values: list[Any] = [entry.get(name) for name in ("tensors", "layer", "first", "sha256")]
        tensors, layer, first, sums = values
        if isinstance(tensors, dict) and tensors.keys() <= self.content.placed.keys() and _are_sums(tensors.values()):
            self.tensor_sums |= tensors
            return sum(self.content.placed[name].bytes for name in tensors)
        known = type(layer) is int and type(first) is int and layer in self.expert_sums and isinstance(sums, list)
        if known and _are_sums(sums) and 0 <= first <= self.content.variant.experts.count - len(sums):
            self.expert_sums[layer] |= dict(enumerate(sums, start=first))
            return len(sums) * self.content.layout.bytes
        raise FormatError(
            f"{self.folder / JOURNAL}: expected pieces of this model, found {entry!r:.80}; use force to start over"
        )

    # ---- Writing --------------------------------------------------------------------------------------------

    def write(self, task: progress.Task) -> None:
        """Makes every piece that is not there yet. However it ends, finished pieces are in the journal."""
        task.advance(self.resumed)
        waiting: deque[Future[Piece]] = deque()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="moeflux-pack")
        with refusals(f"writing {self.folder}"), pool:
            try:
                for job in self._jobs():
                    waiting.append(pool.submit(job))
                    if len(waiting) > self.workers:
                        self._keep(waiting.popleft().result(), task)
                while waiting:
                    self._keep(waiting.popleft().result(), task)
            except BaseException:
                self._stop.set()
                for future in waiting:
                    if not future.cancel() and future.exception() is None:
                        self._keep(future.result(), task)
                raise
            finally:
                self._sync()

    def _jobs(self) -> Iterator[Callable[[], Piece]]:
        """What is left to do, ordered by where the sources lie."""
        for unit in sorted(self.content.dense, key=lambda unit: unit.position):
            if not all(tensor.name in self.tensor_sums for tensor in unit.tensors):
                yield partial(self._write_dense, unit)
        count = max(1, GROUP_BYTES // self.content.layout.bytes)
        for layer in sorted(self.content.variant.moe_layers, key=self.content.layer_position):
            for first, number in self._missing(layer, count):
                yield partial(self._write_experts, layer, first, number)

    def _missing(self, layer: int, limit: int) -> Iterator[tuple[int, int]]:
        """Runs (first, count) of at most `limit` experts that are not on disk."""
        run: list[int] = []
        for expert in range(self.content.variant.experts.count + 1):
            absent = expert < self.content.variant.experts.count and expert not in self.expert_sums[layer]
            if run and (not absent or len(run) == limit):
                yield run[0], len(run)
                run = []
            if absent:
                run.append(expert)

    def _write_dense(self, unit: DenseUnit) -> Piece:
        path = self.folder / packed.WEIGHTS
        hashes = [hashlib.sha256() for _ in unit.tensors]
        offsets = [self.content.placed[tensor.name].offset for tensor in unit.tensors]
        ends = [offset + tensor.bytes for offset, tensor in zip(offsets, unit.tensors, strict=True)]
        with _Writing(path) as descriptor:
            for parts in unit.produce():
                if self._stop.is_set():
                    raise Stopped
                for i, part in enumerate(parts):
                    hashes[i].update(part)
                    _write_all(descriptor, part, offsets[i])
                    offsets[i] += len(part)
        assert offsets == ends, unit.key
        sums = {tensor.name: each.hexdigest() for tensor, each in zip(unit.tensors, hashes, strict=True)}
        return Piece({"tensors": sums}, unit.bytes, packed.WEIGHTS)

    def _write_experts(self, layer: int, first: int, count: int) -> Piece:
        if self._stop.is_set():
            raise Stopped
        size = self.content.layout.bytes
        data = self.content.read_experts(layer, first, count)
        assert len(data) == size * count
        name = f"{packed.EXPERTS_DIRECTORY}/{packed.layer_file(layer)}"
        with _Writing(self.folder / name) as descriptor:
            _write_all(descriptor, data, first * size)
        sums = [hashlib.sha256(data[i * size : (i + 1) * size]).hexdigest() for i in range(count)]
        return Piece({"layer": layer, "first": first, "sha256": sums}, len(data), name)

    def _keep(self, piece: Piece, task: progress.Task) -> None:
        self._recall(piece.entry)
        self._unsynced.append(piece)
        task.advance(piece.bytes)
        waited = time.monotonic() - self._last_sync
        if sum(piece.bytes for piece in self._unsynced) >= SYNC_BYTES or waited >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        """Syncs the bytes of the kept pieces to the disk, then writes their journal entries."""
        for name in {piece.file for piece in self._unsynced}:
            files.sync(self.folder / name)
        if self._unsynced:
            assert self.journal is not None
            self.journal.append([piece.entry for piece in self._unsynced])
        self._unsynced = []
        self._last_sync = time.monotonic()

    # ---- After ----------------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """Writes all small files, moeflux.json last, and syncs everything."""
        content = self.content
        experts = {layer: [sums[e] for e in range(len(sums))] for layer, sums in self.expert_sums.items()}
        small = {
            packed.MANIFEST: _json(
                packed.manifest(content.variant, content.source["path"], content.placed, content.experts)
            ),
            f"{packed.EXPERTS_DIRECTORY}/{packed.LAYOUT}": _json(packed.layout(content.variant, content.layout)),
            **{name: text.encode() for name, text in content.texts.items()},
            **{path.name: files.read_bytes(path) for path in content.copies},
        }
        listed: dict[str, dict[str, Any]] = {name: {"bytes": size} for name, size in content.data_files().items()}
        for name, data in small.items():
            listed[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        description = Description(
            variant=content.variant,
            source=content.source,
            experts=content.experts,
            expert_sha256=experts,
            tensor_sha256=self.tensor_sums,
            files=dict(sorted(listed.items())),
        )
        small[packed.DESCRIPTION] = _json(description.to_json())
        for name, data in small.items():
            with _Writing(self.folder / name) as descriptor:
                os.ftruncate(descriptor, 0)
                _write_all(descriptor, np.frombuffer(data, np.uint8), 0)
                os.fsync(descriptor)
        files.sync(self.folder / packed.EXPERTS_DIRECTORY)
        files.sync(self.folder)
        return description

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()


def _are_sums(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) and SHA256.fullmatch(value) for value in values)


def worker_count() -> int:
    """Enough to overlap reading, hashing and writing; more only compete for the disk."""
    return max(2, min(4, os.cpu_count() or 1))


class _Writing:
    """A descriptor for writing at offsets. System errors inside the `with` become an IoError that names the path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> int:
        self.descriptor = files.open_to_write(self.path)
        return self.descriptor

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        os.close(self.descriptor)
        if isinstance(error, OSError):
            raise files.io_error(error, f"{self.path}: {error.strerror}") from error


def _write_all(descriptor: int, data: np.ndarray, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
