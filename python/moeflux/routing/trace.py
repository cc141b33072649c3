"""Which experts a router picked, token by token. A trace is recorded from a model (`Model.trace`), kept in a file, and
played by `moeflux replay`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeflux import _core, files
from moeflux.errors import FormatError, NotFoundError
from moeflux.stores.tensor_file import check_kind, chunks_of, read_arrays

__all__ = ["Trace"]

FORMAT = "moeflux-trace"
VERSION = "2"
"""Of the files that are written. It has XXH64 where the first one had SHA-256."""
VERSIONS = ("1", VERSION)
MAX_EXPERTS = 4096
MAX_BYTES = 4 << 30
BYTE_IDS = 256
"""With at most so many experts in a layer, an id is one byte in the file; else two."""


@dataclass(frozen=True)
class Trace:
    """What was picked, and by what. Checked when it is read."""

    model: str
    fingerprint: str
    num_experts: int  # of a layer
    expert_bytes: int  # of one read
    layers: tuple[int, ...]  # of the model, those with experts
    experts: np.ndarray = field(repr=False)  # uint16 [tokens, layers, k], in router order
    passes: np.ndarray = field(repr=False)  # tokens that were evaluated together; they add up to `tokens`

    @property
    def tokens(self) -> int:
        return len(self.experts)

    @property
    def experts_per_token(self) -> int:
        return int(self.experts.shape[2])

    @property
    def all_experts(self) -> int:
        """How many experts all layers have together: that many slots hold everything."""
        return len(self.layers) * self.num_experts

    @property
    def experts_used(self) -> int:
        """How many experts were picked at least once."""
        places = np.arange(len(self.layers))[None, :, None] * self.num_experts + self.experts
        return len(np.unique(places))

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens of {self.model}: {self.experts_per_token} of {self.num_experts} experts in "
            f"{len(self.layers)} layers, {self.experts_used} of {self.all_experts} picked at least once"
        )

    # ---- Files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "num_experts": str(self.num_experts),
            "expert_bytes": str(self.expert_bytes),
        }
        ids = self.experts.astype("<u2")
        narrow = ids.astype("u1") if self.num_experts <= BYTE_IDS else ids[..., None].view("u1")
        arrays = {
            "experts": narrow,
            "layers": np.asarray(self.layers, "<i4"),
            "passes": np.asarray(self.passes, "<i4"),
        }
        files.write_atomically(files.expanded(path), chunks_of(metadata, arrays))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        path = files.expanded(path)
        if not files.exists(path):
            raise NotFoundError(f"{path}: expected a trace, found nothing")
        file = _core.SafetensorsFile(path)
        metadata = file.metadata
        check_kind(path, metadata, FORMAT, VERSIONS)
        num_experts = count(path, metadata, "num_experts", MAX_EXPERTS)
        expert_bytes = count(path, metadata, "expert_bytes", 1 << 40)
        check_entries(path, file, num_experts)
        size = sum(entry.bytes for entry in file.tensors.values())
        if size > MAX_BYTES:
            raise FormatError(f"{path}: expected at most {MAX_BYTES} bytes of picks, found {size}")
        arrays = read_arrays(path, file)
        ids = arrays["experts"]
        if ids.ndim == 4:
            ids = ids.view("<u2")[..., 0]
        trace = cls(
            metadata.get("model", ""),
            metadata.get("fingerprint", ""),
            num_experts,
            expert_bytes,
            tuple(arrays["layers"].tolist()),
            ids.astype(np.uint16),
            arrays["passes"],
        )
        check_content(path, trace)
        return trace


def count(path: Path, metadata: dict[str, str], name: str, maximum: int) -> int:
    text = metadata.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 15 and 1 <= int(text) <= maximum):
        raise FormatError(f"{path}: {name}: expected 1 to {maximum}, found {text!r:.40}")
    return int(text)


def check_entries(path: Path, file: _core.SafetensorsFile, num_experts: int) -> None:
    dimensions = {"experts": ("U8", 3 if num_experts <= BYTE_IDS else 4), "layers": ("I32", 1), "passes": ("I32", 1)}
    for name in sorted(dimensions.keys() | file.tensors.keys()):
        entry = file.tensors.get(name)
        if name not in dimensions or entry is None:
            wanted = f"expected {', '.join(dimensions)}"
            raise FormatError(
                f'{path}: tensor "{name}": {wanted}, found it {"missing" if entry is None else "besides"}'
            )
        dtype, rank = dimensions[name]
        if entry.dtype != dtype or len(entry.shape) != rank or (rank == 4 and entry.shape[3] != 2):
            found = f"{entry.dtype} {tuple(entry.shape)}"
            raise FormatError(f'{path}: tensor "{name}": expected {dtype} in {rank} dimensions, found {found}')


def check_content(path: Path, trace: Trace) -> None:
    def require(holds: Any, what: str) -> None:
        if not holds:
            raise FormatError(f"{path}: {what}")

    _, layers, k = trace.experts.shape
    require(layers == len(trace.layers) > 0, f"layers: expected {layers}, found {len(trace.layers)}")
    ascending = trace.layers[0] >= 0 and all(a < b for a, b in zip(trace.layers, trace.layers[1:], strict=False))
    require(ascending, f"layers: expected ascending numbers from 0 on, found {list(trace.layers)!s:.60}")
    require(1 <= k <= trace.num_experts, f"experts: expected 1 to {trace.num_experts} of a token, found {k}")
    total = int(trace.passes.sum(dtype=np.int64))
    whole = (trace.passes > 0).all() and total == trace.tokens
    require(whole, f"passes: expected positive numbers that add up to {trace.tokens}, found {total}")
    if trace.tokens == 0:
        return
    largest = int(trace.experts.max())
    require(largest < trace.num_experts, f"experts: expected 0 to {trace.num_experts - 1}, found {largest}")
    ordered = np.sort(trace.experts, axis=-1)
    twice = np.argwhere(ordered[..., 1:] == ordered[..., :-1])
    if len(twice):
        token, layer, _ = twice[0]
        require(False, f"experts: token {token}, layer {trace.layers[layer]}: expected {k} experts, found one twice")
