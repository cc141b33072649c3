"""States of sessions, on their way between a session and a file. They pass in parts, so that no copy of one is ever in
memory. The files are those that `Snapshot` reads and writes, byte for byte."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

import numpy as np

from moeflux import _core, files
from moeflux._core import SafetensorsFile, StatePieces, TensorEntry
from moeflux.errors import FormatError, IoError, refusals
from moeflux.models.variants import Variant
from moeflux.runtime.snapshot import FIXED, SCALE, Layers, check_directory, layers_in, metadata_of, part_of, pieces_of
from moeflux.stores.tensor_file import NEW_SUMS, Form, Sums, check_sums, digest, header_of, size_of, sums_in

__all__ = ["PASSING_BYTES", "load_state", "save_state", "state_file_bytes"]

PART = 1 << 19
THREADS = 4
PASSING_BYTES = 8 << 20
"""What a state takes while it passes: a part and a stack for each thread, one part more to write from, tokens."""

Move = Callable[[int, int, memoryview], object]
"""Fills memory with the bytes of a piece, by its number, that begin at a place; and brings them to where they go."""


def state_file_bytes(variant: Variant, fingerprint: str, kv_dtype: str, position: int, layers: Layers = None) -> int:
    """What the file of a state has, of all layers or of those of a part."""
    codes = kv_dtype == "q8"
    rows = {"f32": "F32", "bf16": "BF16", "q8": "I8"}[kv_dtype]
    forms = {
        f"layers.{layer}.{name}": Form("F32" if name in FIXED else "BF16" if name.endswith(SCALE) else rows, shape)
        for (layer, name), shape in pieces_of(variant, position, codes, layers).items()
    }
    forms["tokens"] = Form("I32", (position,))
    return size_of(metadata_of(variant, fingerprint, position, layers), forms)


# ---- Writing ----------------------------------------------------------------------------------------------------


def save_state(session: _core.Session, variant: Variant, fingerprint: str, path: Path) -> None:
    """Writes the state of a session of this model, whose tokens are known. The file comes into being as a whole or not
    at all."""
    with refusals(f"{path}: its parts"):
        tokens = np.asarray(session.tokens, "<i4")

    def write(pieces: StatePieces) -> None:
        metadata = metadata_of(variant, fingerprint, len(tokens), part_of(session, variant))
        forms = {f"layers.{layer}.{name}": Form(dtype, tuple(shape)) for layer, name, dtype, shape in pieces.list()}
        sizes = [form.bytes for form in forms.values()]
        found = digests(NEW_SUMS, sizes, lambda _: pieces.read)
        sums = dict(zip(forms, found, strict=True)) | {"tokens": digest(NEW_SUMS, tokens)}
        header = header_of(metadata, forms | {"tokens": Form.of(tokens)}, sums)
        files.write_atomically(path, itertools.chain([header], parts_of(pieces, sizes), [tokens]), private=True)

    with refusals(f"{path}: its parts"):
        session.show_state(write)


def parts_of(pieces: StatePieces, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """One after the other, in the same memory."""
    part = np.empty(PART, np.uint8)
    for index, size in enumerate(sizes):
        for begin in range(0, size, PART):
            here = part[: size - begin]
            pieces.read(index, begin, here)
            yield here


# ---- Reading ----------------------------------------------------------------------------------------------------


def load_state(session: _core.Session, variant: Variant, fingerprint: str, path: Path, tokens: np.ndarray) -> None:
    """Brings a session of this model to the state after these tokens. FormatError when the file does not have it, in
    the session's type of rows; the session may be unusable then."""
    with refusals(f"{path}: its parts"):
        file = SafetensorsFile(path)
        position = check_directory(path, file, variant, session.max_context)
        same = layers_in(path, file, variant) == part_of(session, variant)
        if file.metadata.get("fingerprint") != fingerprint or position != len(tokens) or not same:
            raise FormatError(f"{path}: expected {len(tokens)} tokens of this model, found another state")

        def fill(pieces: StatePieces) -> None:
            forms = {f"layers.{layer}.{name}": Form(dtype, tuple(shape)) for layer, name, dtype, shape in pieces.list()}
            for name, form in forms.items():
                entry = file.tensors.get(name)  # none: scales of codes, in the file of rows that are none
                if entry is None or entry.dtype != form.dtype:
                    there = entry.dtype if entry else "nothing"
                    raise FormatError(f'{path}: tensor "{name}": expected {form.dtype}, found {there}')
            entries, wanted = [file.tensors[name] for name in forms], list(forms.values())

            def moving(stack: ExitStack) -> Move:
                data = stack.enter_context(files.open_file(path))

                def move(index: int, begin: int, part: memoryview) -> None:
                    read_exactly(path, data, entries[index].offset + begin, part)
                    bring(pieces, index, entries[index], wanted[index], begin, part)

                return move

            found = digests(sums_in(file), [entry.bytes for entry in entries], moving)
            check_sums(path, file, dict(zip(forms, found, strict=True)))

        check_tokens(path, file, tokens)
        session.fill_state(position, np.asarray(tokens, np.int32), fill)


def bring(pieces: StatePieces, index: int, entry: TensorEntry, form: Form, begin: int, part: memoryview) -> None:
    """Writes the bytes of a file's tensor that begin at a place. An older file has every row: of layers with a window,
    a session takes the last ones."""
    if tuple(entry.shape) == form.shape:
        pieces.write(index, begin, part)
        return
    sizes = zip(entry.shape, form.shape, strict=True)
    axis = next(axis for axis, (there, wanted) in enumerate(sizes) if there != wanted)
    row = entry.bytes // math.prod(entry.shape[: axis + 1])
    run, kept, end = entry.shape[axis] * row, form.shape[axis] * row, begin + len(part)
    for at in range(begin // run * run, end, run):  # the rows of all positions
        first, last = max(begin, at + run - kept), min(end, at + run)
        if first < last:
            pieces.write(index, first - (at // run + 1) * (run - kept), part[first - begin : last - begin])


def check_tokens(path: Path, file: SafetensorsFile, tokens: np.ndarray) -> None:
    entry = file.tensors["tokens"]
    found = np.empty(entry.shape, "<i4")
    with files.open_file(path) as data:
        read_exactly(path, data, entry.offset, memoryview(found.view(np.uint8)))
    if not np.array_equal(found, tokens):
        raise FormatError(f"{path}: expected the state of the tokens that it is named after, found another")


def read_exactly(path: Path, file: FileIO, offset: int, part: memoryview) -> None:
    with files.system_errors(path):
        file.seek(offset)
        while len(part):
            count = file.readinto(part)
            if not count:
                raise IoError(f"{path}: expected {len(part)} bytes more, found the end of the file")
            part = part[count:]


# ---- Both -------------------------------------------------------------------------------------------------------


def digests(kind: Sums, sizes: Sequence[int], moving: Callable[[ExitStack], Move]) -> list[str]:
    """The sums of pieces of these sizes. Each is moved part by part, several pieces at a time, by what `moving` makes
    for it and for those behind it."""
    found = [""] * len(sizes)
    # The largest first, so that none of them is left for the end.
    left, lock = iter(sorted(range(len(sizes)), key=lambda index: -sizes[index])), threading.Lock()

    def next_piece() -> int | None:
        with lock:
            return next(left, None)

    def work() -> None:
        room = memoryview(bytearray(PART))
        with ExitStack() as stack:
            move = moving(stack)
            while (index := next_piece()) is not None:
                made = kind.new()
                for begin in range(0, sizes[index], PART):
                    part = room[: sizes[index] - begin]
                    move(index, begin, part)
                    made.update(part)
                found[index] = made.hexdigest()

    with ThreadPoolExecutor(THREADS, "moeflux-state") as threads:
        for each in [threads.submit(work) for _ in range(THREADS)]:
            each.result()
    return found
