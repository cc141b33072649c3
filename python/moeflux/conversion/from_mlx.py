"""A stock MLX folder, or a GGUF file, as the content of a packed store: the same bytes at other places. Nothing is
requantised."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import _core
from moeflux.conversion.packer import Content, DenseUnit, binding, companions
from moeflux.errors import FormatError
from moeflux.files import resolved, size_and_time
from moeflux.models.model_files import MADE, files_of
from moeflux.models.tokenizer_rules import TOKENIZER
from moeflux.models.variants import Variant
from moeflux.stores.floats import decode, encode, is_float, logarithms
from moeflux.stores.packed import DenseTensor
from moeflux.stores.spans import SpanReader
from moeflux.stores.store import open_store

__all__ = ["content_of_gguf", "content_of_mlx"]

PART_BYTES = 8 << 20
Span = tuple[int, int, int]  # file, offset, bytes


def content_of_mlx(folder: Path, variant: Variant) -> Content:
    directory = _core.open_mlx(str(folder), variant.to_json())
    bound, copies = binding(folder, directory.files, "as stored"), companions(folder)
    return _content("mlx", folder, variant, directory, bound, copies=copies)


def content_of_gguf(path: Path) -> Content:
    """With what lies beside the weights of a packed store, made of the file's values."""
    with open_store(path) as store:
        variant, directory = store.variant, store.directory
    if directory.layers_differ:
        raise FormatError(
            f"{path}: expected experts of the same types in all layers, for a packed store has no others, found more "
            f"types; the file runs as it is"
        )
    beside = files_of(path)
    texts = {name: json.dumps(beside.json_of(name), indent=2) for name in MADE}
    if beside.has(TOKENIZER):
        texts[TOKENIZER] = beside.bytes_of(TOKENIZER).decode()
    bound = {"journal": 2, "format": "as stored"}
    bound["files"] = [[Path(file).name, *size_and_time(file)] for file in directory.files]
    return _content("gguf", path, variant, directory, bound, texts=texts)


def _content(
    kind: str,
    path: Path,
    variant: Variant,
    directory: _core.StoreDirectory,
    bound: dict[str, Any],
    *,
    copies: Sequence[Path] = (),
    texts: dict[str, str] | None = None,
) -> Content:
    reader = SpanReader(directory.files)
    layout = directory.experts
    units = [_unit(name, tensor, directory.formats, reader) for name, tensor in directory.tensors.items()]

    def read_experts(layer: int, first: int, count: int) -> np.ndarray:
        data = np.empty(count * layout.bytes, np.uint8)
        view, at, requests = memoryview(data), 0, []
        for expert in range(first, first + count):
            for file, offset, size in directory.expert_spans(layer, expert):
                requests.append((file, offset, view[at : at + size]))
                at += size
        reader.read_all(requests)
        return data

    dropped = [f"{len(directory.ignored)} tensors that a text model does not use"] if directory.ignored else []
    return Content(
        variant=variant,
        source={"kind": kind, "path": str(resolved(path)), "dropped": dropped},
        binding=bound,
        experts=layout.formats,
        dense=units,
        read_experts=read_experts,
        layer_position=lambda layer: min((file, offset) for file, offset, _ in directory.expert_spans(layer, 0)),
        copies=list(copies),
        texts=texts or {},
        close=reader.close,
    )


def _unit(name: str, tensor: _core.Tensor, formats: dict[str, _core.QuantFormat], reader: SpanReader) -> DenseUnit:
    spans = list(tensor.spans)
    dtype, size = tensor.dtype, sum(bytes for _, _, bytes in spans)
    if tensor.negated_exp or (name.endswith(".A_log") and is_float(dtype) and dtype != "F32"):
        # Every reader of a packed store may rely on f32 here; bf16 and f16 widen exactly.
        place = DenseTensor(name, "F32", tuple(tensor.shape), int(np.prod(tensor.shape)) * 4)
        meant = logarithms if tensor.negated_exp else None
        return DenseUnit(name, (place,), lambda: _promoted(spans, dtype, reader, meant), spans[0][:2])
    format = formats.get(name.removesuffix(".weight"))
    bits = format.bits if format is not None and dtype == "U32" else 0
    block = str(format) if format is not None and format.is_blocks else ""
    place = DenseTensor(name, dtype, tuple(tensor.shape), size, bits, block, is_table=tensor.is_table)
    return DenseUnit(name, (place,), lambda: _parts(spans, reader), spans[0][:2])


def _promoted(
    spans: list[Span], dtype: str, reader: SpanReader, meant: Callable[[np.ndarray], np.ndarray] | None
) -> Iterator[tuple[np.ndarray]]:
    """The values in f32. `meant` makes of them what the model reads, where the file has another form."""
    for (raw,) in _parts(spans, reader):
        values = decode(raw, dtype)
        yield (encode(meant(values) if meant else values, "F32"),)


def _parts(spans: list[Span], reader: SpanReader) -> Iterator[tuple[np.ndarray]]:
    """The bytes of the spans in order, several short spans or a part of a long one at a time."""
    gathered: list[Span] = []
    total = 0
    for file, offset, size in spans:
        while size:
            take = min(size, PART_BYTES - total)
            gathered.append((file, offset, take))
            offset, size, total = offset + take, size - take, total + take
            if total == PART_BYTES:
                yield (_read(gathered, total, reader),)
                gathered, total = [], 0
    if total:
        yield (_read(gathered, total, reader),)


def _read(spans: list[Span], total: int, reader: SpanReader) -> np.ndarray:
    data = np.empty(total, np.uint8)
    view, at, requests = memoryview(data), 0, []
    for file, offset, size in spans:
        requests.append((file, offset, view[at : at + size]))
        at += size
    reader.read_all(requests)
    return data
