"""Saved sessions: our own format, and the two wire formats of the older engine, read and written byte for byte.

Ours is a safetensors file. It has one tensor for each piece of state ("layers.3.k"), one more for the scales where the
piece is codes ("layers.3.k_scale"), and one for the token ids ("tokens"). Its metadata have the version, the
fingerprint of the model, the position and a sum of every tensor, and which layers they are of where an engine has
not all of them. See docs/formats.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import _core, files
from moeflux._core import SafetensorsFile, parse_snapshot_wire, snapshot_wire_header, snapshot_wire_layout
from moeflux.errors import ArgumentError, BufferTooSmall, FormatError, StateError, found, refusals
from moeflux.models.variants import MAX_CONTEXT, Variant
from moeflux.stores.floats import bf16_bits, decode, decoded_rows, row_codes
from moeflux.stores.tensor_file import arrays_in, check_kind, chunks_of, forms_of, read_arrays, size_of

__all__ = ["Snapshot"]

FORMAT = "moeflux-session"
VERSION = "4"
"""Of the files that are written. Sums are XXH64, where the earlier ones had SHA-256."""
VERSIONS_OF_ALL_ROWS = {"1": False, "2": True}
"""Whether rows are codes in files that have every row of layers with a window, too. From version 3 on, layers with a
window have only the rows that the next one sees, and the rows are of any type."""
VERSIONS = (*VERSIONS_OF_ALL_ROWS, "3", VERSION)
WIRE = {"wire-1": 1, "wire-2": 2}
WIRE_MAGIC = b"XLFM"
FIXED = ("conv", "recurrent", "ngram_conv", "index_rows")
"""Pieces that do not grow with the position, and are always f32."""
TYPES = {np.float32: "f32", np.uint16: "bf16", np.int8: "q8"}

SCALE = "_scale"
"""Behind the name of a piece: the scales of its codes."""

Key = tuple[int, str]  # layer, piece
Layers = tuple[int, int] | None
"""Those of a part of a model: the first, and one past the last. None: all."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a session at one position. Keys and values are f32, or bf16 as u16 bits, or int8 codes; for codes
    there are scales, bf16 as u16 bits [heads, rows]. Layers with a window have only the rows that the next one sees."""

    variant: Variant
    position: int
    tensors: dict[Key, np.ndarray] = field(repr=False)
    tokens: tuple[int, ...] = ()  # those evaluated; empty when not known
    fingerprint: str = ""  # of the model; empty when not known
    conversation: str = field(default="", repr=False)  # what was said, as moeflux.text.conversation writes it
    layers: Layers = None  # that the state is of: the first and one past the last of a part; None: all

    @classmethod
    def of(cls, core: _core.Session, variant: Variant, fingerprint: str) -> Snapshot:
        """A copy of what a session of a model with this fingerprint holds now."""
        before = core.logits_serial
        position, tokens = core.position, tuple(core.tokens)
        tensors = {(layer, name): array for layer, name, array in core.read_state()}
        if core.logits_serial != before:
            raise StateError("snapshot: expected a session that stands still, found another thread evaluating with it")
        return cls(variant, position, tensors, tokens, fingerprint, layers=part_of(core, variant))

    def part(self, first: int, last: int) -> Snapshot:
        """Of some of its layers, the first and one past the last, for a model that has no others."""
        begin, end = self.layers or (0, self.variant.num_layers)
        if not begin <= first < last <= end:
            raise ArgumentError(f"layers: expected some of {named((begin, end))}, found {first} and {last}")
        layers = None if (first, last) == (0, self.variant.num_layers) else (first, last)
        tensors = {key: array for key, array in self.tensors.items() if first <= key[0] < last}
        return replace(self, tensors=tensors, layers=layers)

    @classmethod
    def joined(cls, parts: Sequence[Snapshot]) -> Snapshot:
        """Of all layers, from those of the parts of a model, in order. A whole model goes on with it where the parts
        stood."""
        end = 0
        for place, each in enumerate(parts):
            first, last = each.layers or (0, each.variant.num_layers)
            same = [(of.variant, of.fingerprint, of.position, of.tokens) for of in (parts[0], each)]
            if first != end or same[0] != same[1]:
                raise ArgumentError(
                    f"parts[{place}]: expected layers from {end} on, of {parts[0].fingerprint[:16]}... and its "
                    f"{parts[0].position} tokens, found {named((first, last))} of {each.fingerprint[:16]}... and "
                    f"{each.position} tokens"
                )
            end = last
        if not parts or end != parts[0].variant.num_layers:
            raise ArgumentError(f"parts: expected all layers, found those up to {end}")
        tensors = {key: array for each in parts for key, array in each.tensors.items()}
        return replace(parts[0], tensors=tensors, layers=None)

    def tensors_for(
        self, variant: Variant, fingerprint: str, max_context: int, kv_dtype: str, layers: Layers = None
    ) -> list[np.ndarray]:
        """The pieces in the order and the types of a session. ArgumentError when they belong to another model or to
        other layers, or do not fit into the session."""
        if self.fingerprint and self.fingerprint != fingerprint:
            raise ArgumentError(
                f"restore: expected a snapshot of the model {fingerprint[:16]}..., "
                f"found one of {self.fingerprint[:16]}..."
            )
        if self.layers != layers:
            raise ArgumentError(f"restore: expected a snapshot of {named(layers)}, found one of {named(self.layers)}")
        if self.position < 0:
            raise ArgumentError(f"restore: expected a position from 0 on, found {self.position}")
        check_length(self.position, max_context)
        pieces = state_of(variant, self.position, layers)
        coded = {key for key in pieces if key[1] not in FIXED and scale_key(key) in self.tensors}
        expected = pieces | {scale_key(key): scale_shape(pieces[key]) for key in coded}
        if expected.keys() != self.tensors.keys():
            odd = min(expected.keys() ^ self.tensors.keys())
            raise ArgumentError(f"restore: expected the pieces of {variant.name}, found another set: {odd}")
        for (layer, name), shape in expected.items():
            array = self.tensors[layer, name]
            types: tuple[type, ...] = (np.float32, np.uint16)
            if name in FIXED:
                types = (np.float32,)
            elif (layer, name) in coded:
                types = (np.int8,)
            elif (layer, name) not in pieces:
                types = (np.uint16,)
            if array.shape != shape or array.dtype not in types:
                names = " or ".join(np.dtype(kind).name for kind in types)
                raise ArgumentError(
                    f"restore: layer {layer}, {name}: expected {names} {shape}, found {array.dtype} {array.shape}"
                )
        return [
            np.ascontiguousarray(array)
            for key in pieces
            for array in ((self.tensors[key],) if key[1] in FIXED else self.rows_as(key, kv_dtype))
        ]

    def rows_as(self, key: Key, kv_dtype: str) -> tuple[np.ndarray, ...]:
        """The rows of a piece in another type, rounded as a session of that type would have rounded them itself, or in
        the type that they have. Of codes there are two arrays, these and their scales."""
        array, scales = self.tensors[key], self.tensors.get(scale_key(key))
        if kv_dtype == TYPES.get(array.dtype.type):
            return (array,) if scales is None else (array, scales)
        if scales is not None:
            array = decoded_rows(array.reshape(heads_of(array.shape)), scales.T).reshape(array.shape)
        wide = as_f32(array)
        if kv_dtype == "f32":
            return (wide,)
        if kv_dtype == "bf16":
            return (bf16_bits(wide).reshape(wide.shape),)
        codes, scales = row_codes(wide.reshape(heads_of(wide.shape)))
        return codes.reshape(wide.shape), scales.T

    # ---- Files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, format: str = "moeflux") -> None:
        """Writes the file in one pass and renames it into place. `format`: "moeflux", "wire-1" or "wire-2"."""
        files.write_atomically(files.expanded(path), self._chunks(format), private=True)

    @classmethod
    def load(cls, path: str | Path, variant: Variant, max_tokens: int = MAX_CONTEXT) -> Snapshot:
        """Reads a file of any of the formats, checked against the variant. FormatError names what is wrong with it;
        StateError when it holds more than `max_tokens` tokens, which are not read."""
        path = files.expanded(path)
        with files.open_file(path) as file, files.system_errors(path):
            is_wire = file.read(len(WIRE_MAGIC)) == WIRE_MAGIC
        return load_wire(path, variant, max_tokens) if is_wire else load_own(path, variant, max_tokens)

    # ---- Memory -------------------------------------------------------------------------------------------------

    def size(self, format: str = "moeflux") -> int:
        """Bytes that the file has, and that `to_bytes` makes; known without making them."""
        wire = WIRE.get(format)
        if wire:
            check_whole(self, format)
            return snapshot_wire_layout(self.variant.to_json(), wire, self.position).bytes
        check_format(format)
        return size_of(own_metadata(self), forms_of(own_arrays(self)))

    def to_bytes(self, format: str = "moeflux") -> bytes:
        """What `save` writes to a file."""
        with refusals("a snapshot's bytes"):
            return b"".join(self._chunks(format))

    def write_into(self, buffer: Any, format: str = "moeflux") -> memoryview:
        """The same into the first bytes of the caller's memory, a bytearray say: the part that was written.
        BufferTooSmall when there are fewer than `size`; nothing is written then."""
        needed = self.size(format)
        try:
            room = memoryview(buffer).cast("B")
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"buffer: expected memory without gaps, found {found(buffer)}") from error
        if room.readonly:
            raise ArgumentError(f"buffer: expected memory that can be written, found {found(buffer)}")
        if room.nbytes < needed:
            small = BufferTooSmall(f"buffer: expected at least {needed} bytes for the snapshot, found {room.nbytes}")
            small.needed, small.found = needed, room.nbytes
            raise small
        at = 0
        with refusals("a snapshot's bytes"):
            for chunk in self._chunks(format):
                data = chunk if isinstance(chunk, bytes) else chunk.reshape(-1).view(np.uint8)
                room[at : at + len(data)] = data
                at += len(data)
        return room[:at]

    @classmethod
    def from_bytes(
        cls, data: Any, variant: Variant, max_tokens: int = MAX_CONTEXT, where: str = "snapshot"
    ) -> Snapshot:
        """As `load`, of the bytes of a file. They are copied. `where` begins messages."""
        try:
            view = np.frombuffer(data, np.uint8)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{where}: expected bytes without gaps, found {found(data)}") from error
        with refusals(f"{where}: its state"):
            if view[: len(WIRE_MAGIC)].tobytes() == WIRE_MAGIC:
                return wire_of(view, where, variant, max_tokens)
            file = SafetensorsFile.of_bytes(view, where)
            return own_of(Path(where), file, lambda: arrays_in(view, file), variant, max_tokens)

    def _chunks(self, format: str) -> Iterator[bytes | np.ndarray]:
        wire = WIRE.get(format)
        if wire:
            check_whole(self, format)
            return wire_chunks(self, wire)
        check_format(format)
        return chunks_of(own_metadata(self), own_arrays(self))


def check_format(format: str) -> None:
    """Of the one that is not among WIRE."""
    if format != "moeflux":
        raise ArgumentError(f"format: expected {', '.join(['moeflux', *WIRE])}, found {format!r:.40}")


def check_whole(snapshot: Snapshot, format: str) -> None:
    if snapshot.layers is not None:
        raise ArgumentError(f"format: expected moeflux for a snapshot of {named(snapshot.layers)}, found {format}")


def check_length(position: int, max_tokens: int) -> None:
    if position > max_tokens:
        raise ArgumentError(f"restore: expected at most {max_tokens} tokens (max_context), found {position}")


def as_f32(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.float32:
        return array
    return decode(np.ascontiguousarray(array).reshape(-1).view(np.uint8), "BF16").reshape(array.shape)


def part_of(core: _core.Session, variant: Variant) -> Layers:
    """The layers of a session."""
    layers = core.layers
    return None if layers == (0, variant.num_layers) else layers


def named(layers: Layers) -> str:
    return "all layers" if layers is None else f"layers {layers[0]} to {layers[1] - 1}"


def state_of(variant: Variant, position: int, layers: Layers, *, all_rows: bool = False) -> dict[Key, tuple[int, ...]]:
    """As `Variant.state`, of some layers."""
    first, last = layers or (0, variant.num_layers)
    state = variant.state(position, all_rows=all_rows)
    return {key: shape for key, shape in state.items() if first <= key[0] < last}


def pieces_of(
    variant: Variant, position: int, codes: bool, layers: Layers = None, *, all_rows: bool = False
) -> dict[Key, tuple[int, ...]]:
    """The shapes of all tensors of a state, in their order. Behind codes are their scales. With `all_rows`, layers with
    a window have every row, too."""
    pieces: dict[Key, tuple[int, ...]] = {}
    for key, shape in state_of(variant, position, layers, all_rows=all_rows).items():
        pieces[key] = shape
        if codes and key[1] not in FIXED:
            pieces[scale_key(key)] = scale_shape(shape)
    return pieces


def scale_key(key: Key) -> Key:
    return key[0], key[1] + SCALE


def heads_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Positions, heads and numbers of a head, of rows of that shape. What has no heads is one."""
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of the scales of such rows: one for each head of a row."""
    return math.prod(shape[1:-1]), shape[0]


# ---- Our own format ---------------------------------------------------------------------------------------------


def own_arrays(snapshot: Snapshot) -> dict[str, np.ndarray]:
    arrays = {f"layers.{layer}.{name}": array for (layer, name), array in snapshot.tensors.items()}
    arrays["tokens"] = np.asarray(snapshot.tokens, "<i4")
    if snapshot.conversation:
        arrays["conversation"] = np.frombuffer(snapshot.conversation.encode(), "u1")
    return arrays


def own_metadata(snapshot: Snapshot) -> dict[str, str]:
    return metadata_of(snapshot.variant, snapshot.fingerprint, snapshot.position, snapshot.layers)


def metadata_of(variant: Variant, fingerprint: str, position: int, layers: Layers = None) -> dict[str, str]:
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint,
        "position": str(position),
        "model": variant.name,
    }
    return metadata if layers is None else metadata | {"layers": f"{layers[0]}:{layers[1]}"}


def layers_in(path: Path, file: SafetensorsFile, variant: Variant) -> Layers:
    """Of a file, what its metadata say."""
    text = file.metadata.get("layers")
    if text is None:
        return None
    first, _, last = text.partition(":")
    numbers = [int(each) if each.isascii() and each.isdigit() and len(each) < 6 else -1 for each in (first, last)]
    if not 0 <= numbers[0] < numbers[1] <= variant.num_layers:
        raise FormatError(f"{path}: layers: expected two of 0:{variant.num_layers}, found {text!r:.60}")
    return numbers[0], numbers[1]


def load_own(path: Path, variant: Variant, max_tokens: int) -> Snapshot:
    file = SafetensorsFile(path)
    return own_of(path, file, lambda: read_arrays(path, file), variant, max_tokens)


def own_of(
    path: Path, file: SafetensorsFile, read: Callable[[], dict[str, np.ndarray]], variant: Variant, max_tokens: int
) -> Snapshot:
    """Of the directory of a file, and its tensors when that is checked."""
    position = check_directory(path, file, variant, max_tokens)
    arrays = read()
    tokens = tuple(arrays.pop("tokens").tolist())
    if tokens and len(tokens) != position:
        raise FormatError(f"{path}: tokens: expected {position}, one a position, found {len(tokens)}")
    try:
        conversation = arrays.pop("conversation", np.empty(0, "u1")).tobytes().decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: conversation: expected UTF-8, found byte {error.start} to be none") from error
    layers = layers_in(path, file, variant)
    pieces = pieces_of(variant, position, has_codes(file), layers)
    tensors = {key: last_rows(arrays[f"layers.{key[0]}.{key[1]}"], shape) for key, shape in pieces.items()}
    return Snapshot(variant, position, tensors, tokens, file.metadata.get("fingerprint", ""), conversation, layers)


def has_codes(file: SafetensorsFile) -> bool:
    codes = VERSIONS_OF_ALL_ROWS.get(file.metadata["version"])
    return any(name.endswith(SCALE) for name in file.tensors) if codes is None else codes


def last_rows(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Of older files, which have all rows, those that a session needs."""
    if array.shape == shape:
        return array
    return np.ascontiguousarray(array[tuple(slice(n - count, n) for n, count in zip(array.shape, shape, strict=True))])


def shapes_in(path: Path, file: SafetensorsFile, variant: Variant, position: int) -> dict[str, tuple[int, ...]]:
    """What a file of its version has, but for the tokens and a conversation."""
    all_rows = file.metadata["version"] in VERSIONS_OF_ALL_ROWS
    layers = layers_in(path, file, variant)
    pieces = pieces_of(variant, position, has_codes(file), layers, all_rows=all_rows)
    return {f"layers.{layer}.{name}": shape for (layer, name), shape in pieces.items()}


def check_directory(path: Path, file: SafetensorsFile, variant: Variant, max_tokens: int) -> int:
    """Returns the position when the file has what a state there takes, and nothing else."""
    metadata = file.metadata
    check_kind(path, metadata, FORMAT, VERSIONS)
    position = metadata.get("position", "")
    if not (position.isascii() and position.isdigit() and len(position) < 10 and int(position) <= MAX_CONTEXT):
        raise FormatError(f"{path}: position: expected 0 to {MAX_CONTEXT}, found {position!r:.60}")
    check_length(int(position), max_tokens)
    expected = shapes_in(path, file, variant, int(position))
    for name in sorted(expected.keys() | file.tensors.keys() | {"tokens"}):
        check_entry(path, name, file.tensors.get(name), expected, has_codes(file))
    return int(position)


def check_entry(path: Path, name: str, entry: Any, expected: dict[str, tuple[int, ...]], codes: bool) -> None:
    if entry is None:
        raise FormatError(f'{path}: tensor "{name}" is missing')
    if name == "tokens":
        fits = entry.dtype == "I32" and len(entry.shape) == 1 and entry.shape[0] <= MAX_CONTEXT
        wanted = f"I32 in one dimension, at most {MAX_CONTEXT}"
    elif name == "conversation":
        fits = entry.dtype == "U8" and len(entry.shape) == 1 and entry.shape[0] <= files.JSON_LIMIT
        wanted = f"U8 in one dimension, at most {files.JSON_LIMIT}"
    elif name not in expected:
        raise FormatError(f'{path}: tensor "{name}": expected a piece of this model\'s state, found something else')
    else:
        piece = name.rpartition(".")[2]
        types = ("F32",) if piece in FIXED else ("I8",) if codes else ("F32", "BF16")
        if piece.endswith(SCALE):
            types = ("BF16",)
        fits = entry.dtype in types and entry.shape == expected[name]
        wanted = f"{' or '.join(types)} {expected[name]}"
    if not fits:
        raise FormatError(f'{path}: tensor "{name}": expected {wanted}, found {entry.dtype} {entry.shape}')


# ---- The wire formats -------------------------------------------------------------------------------------------


def wire_chunks(snapshot: Snapshot, version: int) -> Iterator[bytes | np.ndarray]:
    variant = snapshot.variant.to_json()
    layout = snapshot_wire_layout(variant, version, snapshot.position)
    yield snapshot_wire_header(variant, version)
    lengths, end = set(layout.length_offsets), layout.header_bytes
    for span in layout.spans:
        if end in lengths:
            yield snapshot.position.to_bytes(4, "little")
            end += 4
        key = span.layer, span.part
        yield np.ascontiguousarray(snapshot.tensors[key] if span.part in FIXED else snapshot.rows_as(key, "f32")[0])
        end += span.bytes


def load_wire(path: Path, variant: Variant, max_tokens: int) -> Snapshot:
    limit = check_wire_size(files.size_of(path), str(path), variant, max_tokens)
    return wire_of(np.frombuffer(files.read_bytes(path, limit), np.uint8), str(path), variant, max_tokens)


def check_wire_size(size: int, where: str, variant: Variant, max_tokens: int) -> int:
    """The most that there may be."""
    limit = snapshot_wire_layout(variant.to_json(), 2, max_tokens).bytes  # version 1 has a shorter header
    if size > limit:
        raise ArgumentError(
            f"{where}: expected at most {max_tokens} tokens (max_context), {limit} bytes, found {size} bytes"
        )
    return limit


def wire_of(data: np.ndarray, where: str, variant: Variant, max_tokens: int) -> Snapshot:
    check_wire_size(len(data), where, variant, max_tokens)
    layout = parse_snapshot_wire(data, variant.to_json(), where)
    shapes = variant.state(layout.positions)
    tensors = {}
    for span in layout.spans:
        stored = data[span.offset : span.offset + span.bytes]
        # The lengths before them put the states at odd places, so they are copied to where floats may lie.
        tensors[span.layer, span.part] = np.frombuffer(stored.tobytes(), "<f4").reshape(shapes[span.layer, span.part])
    return Snapshot(variant, layout.positions, tensors)
