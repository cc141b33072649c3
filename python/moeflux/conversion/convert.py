"""Turns an MLX folder, a GGUF file or a Hugging Face checkpoint into a packed store: what to do, doing it, and checking
it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeflux import files
from moeflux._core import ExpertFormats
from moeflux.conversion.destination import (
    JSON_ALLOWANCE,
    check_destination,
    check_space,
    destination,
    growing,
    partial_of,
    reserved,
    resumable,
)
from moeflux.conversion.from_checkpoint import content_of_checkpoint
from moeflux.conversion.from_mlx import content_of_gguf, content_of_mlx
from moeflux.conversion.importance import Calibration
from moeflux.conversion.packer import Content
from moeflux.errors import ArgumentError, FormatError, IoError
from moeflux.models.config import variant_from_config
from moeflux.models.gguf import find_gguf
from moeflux.models.published import parts_of
from moeflux.models.tensors import dense_shapes
from moeflux.models.variants import QuantFormat, Variant
from moeflux.progress import Progress, Silent, time_text
from moeflux.sizes import size_text
from moeflux.stores import packed
from moeflux.stores.checkpoints import is_mlx
from moeflux.stores.packed import DenseTensor
from moeflux.stores.spans import SpanReader
from moeflux.stores.storage import ConvertFormat

__all__ = ["ConvertFormat", "ConvertPlan", "ConvertReport", "convert"]

CHECKS = ("none", "quick", "full")


@dataclass(frozen=True)
class ConvertPlan:
    """What a conversion will read and write. Sizes are bytes."""

    source: Path
    dest: Path
    kind: str  # "mlx", "gguf" or "hf"
    variant: Variant
    expert_format: str
    dense_formats: dict[str, int]  # "4-bit g64" -> how many dense matrices
    dense_tensors: int
    dense_bytes: int
    expert_bytes: int  # of one expert
    layer_bytes: int  # of one layer file
    copied: tuple[str, ...]
    dropped: tuple[str, ...]
    calibrated: str  # by what; empty: by nothing
    resumed: int  # bytes that an earlier run left
    free: int

    @property
    def total(self) -> int:
        return self.dense_bytes + self.layer_bytes * len(self.variant.moe_layers)

    @property
    def needed(self) -> int:
        return self.total - self.resumed + JSON_ALLOWANCE

    @property
    def fits(self) -> bool:
        return self.needed <= self.free

    def __str__(self) -> str:
        v = self.variant
        same = "repacked byte for byte"
        kinds = {"mlx": f"MLX folder, {same}", "gguf": f"GGUF, {same}", "hf": "Hugging Face checkpoint"}
        formats = ", ".join(f"{count} {name}" for name, count in sorted(self.dense_formats.items()))
        layers = len(v.moe_layers)
        lines = [
            f"source    {self.source} ({kinds[self.kind]})",
            f"model     {v.name}: {v.model_type}, {v.num_layers} layers, {v.experts.count} experts",
            f"dense     {size_text(self.dense_bytes)} in {self.dense_tensors} tensors (matrices: {formats})",
            f"experts   {size_text(layers * self.layer_bytes)} in {layers} files of {size_text(self.layer_bytes)}, "
            f"{size_text(self.expert_bytes)} each ({self.expert_format})",
            f"beside    {', '.join(self.copied) or 'no tokenizer and no config.json'}",
            *(f"dropped   {sentence}" for sentence in self.dropped),
            *([f"rounded   {self.calibrated}"] if self.calibrated else []),
            f"into      {self.dest}: needs {size_text(self.needed)}, {size_text(self.free)} free",
        ]
        if self.resumed:
            lines.append(f"resumes   {size_text(self.resumed)} of {size_text(self.total)} are there already")
        return "\n".join(lines)


@dataclass(frozen=True)
class ConvertReport:
    """What was done. After a dry run `fingerprint` is empty and nothing was written."""

    plan: ConvertPlan
    fingerprint: str = ""
    written: int = 0
    seconds: float = 0.0
    checked_experts: int = 0  # compared with the source once more, byte for byte

    def __str__(self) -> str:
        if not self.fingerprint:
            fits = "" if self.plan.fits else ", and it would not fit"
            return f"{self.plan}\ndry run: nothing was written{fits}"
        rate = self.written / max(self.seconds, 1e-9)
        return "\n".join(
            [
                str(self.plan),
                f"wrote     {size_text(self.written)} in {time_text(self.seconds)} ({size_text(rate)}/s)",
                f"checked   {self.checked_experts} experts against the source, equal",
                f"finger    {self.fingerprint}",
            ]
        )


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    format: ConvertFormat | None = None,
    force: bool = False,
    dry_run: bool = False,
    check: str = "quick",
    mtp: bool = False,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Writes the packed store `dest`, growing it in `dest`.partial. If a run is stopped, the next one continues it.

    `format` is for Hugging Face checkpoints only; None takes `ConvertFormat.default`. `check` compares the result with
    the source: "quick" compares four experts of every layer, "full" everything, "none" nothing. `mtp` keeps the layer
    that drafts (multi-token prediction), for `moeflux.load(..., speculate="mtp")`. `calibration` says what an error in
    each column of a matrix weighs (`moeflux.measure.calibrate`). `force` replaces an existing store, and discards an
    unfinished conversion of another source or with other options.
    """
    source, dest, progress = files.expanded(source), destination(dest), progress or Silent()
    if check not in CHECKS:
        raise ArgumentError(f"check: expected {', '.join(CHECKS)}, found {check!r:.40}")
    check_destination(source, dest, force)
    with contextlib.closing(content_of(source, format, mtp, calibration)) as content:
        if dry_run:
            return ConvertReport(plan_of(content, source, dest, resumable(content, partial_of(dest), force)))
        with reserved(dest):
            check_destination(source, dest, force)  # again: another process may have put something there meanwhile
            plan = plan_of(content, source, dest, resumable(content, partial_of(dest), force))
            check_space(dest, plan.needed)
            if calibration is not None:
                calibration.prepare()
            started = time.monotonic()
            with growing(content, dest, plan.resumed, progress) as packer:
                with progress.task("convert", plan.total) as task:
                    packer.write(task)
                checked = compare(content, packer.folder, check, progress)
                description = packer.describe()
    seconds = time.monotonic() - started
    return ConvertReport(plan, description.fingerprint, plan.total - plan.resumed, seconds, checked)


# ---- Before -----------------------------------------------------------------------------------------------------


def content_of(
    source: Path, asked: ConvertFormat | None, mtp: bool = False, calibration: Calibration | None = None
) -> Content:
    """What the store will hold, from headers alone. The names of the tensors tell which kind of folder it is."""
    gguf = find_gguf(source)
    if gguf is not None:
        refuse_calibration(source, "a GGUF file", calibration)
        if asked is not None:
            raise ArgumentError(f"{source}: found a GGUF file, which is repacked as it is; expected no format")
        if mtp:
            raise ArgumentError(f"{source}: mtp: expected the original checkpoint, found a GGUF file")
        return content_of_gguf(gguf)
    if files.exists(source / packed.DESCRIPTION):
        raise FormatError(f"{source}: expected an MLX folder or a Hugging Face checkpoint, found a packed store")
    config = files.read_json(source / "config.json")
    variant = variant_from_config(source)
    if is_mlx(source, config):
        refuse_calibration(source, "an MLX folder", calibration)
        if asked is not None:
            raise ArgumentError(
                f"{source}: found an MLX folder, which is repacked as it is; expected no format. To change the bits, "
                "convert the original checkpoint"
            )
        if mtp:
            raise ArgumentError(
                f"{source}: mtp: expected the original checkpoint, found an MLX folder, whose layer that drafts is "
                "not known here"
            )
        return content_of_mlx(source, variant)
    if mtp:
        if any(part.get("mtp_use_dedicated_embeddings") for part in parts_of(config)):
            raise FormatError(f"{source}: mtp_use_dedicated_embeddings: expected false, found true")
        variant = variant.with_draft()
    asked = asked or ConvertFormat.default(config)
    if calibration is not None and not (asked.is_rounded(asked.experts) or asked.is_rounded(asked.dense)):
        raise ArgumentError(f"calibrate: expected a format that rounds by scales it may choose, found {asked}")
    return content_of_checkpoint(source, config, variant, asked, calibration)


def refuse_calibration(source: Path, what: str, calibration: Calibration | None) -> None:
    if calibration is not None:
        raise ArgumentError(f"{source}: found {what}, which is repacked as it is; expected no calibration")


def plan_of(content: Content, source: Path, dest: Path, resumed: int) -> ConvertPlan:
    return ConvertPlan(
        source=source,
        dest=dest,
        kind=content.source["kind"],
        variant=content.variant,
        expert_format=describe(content.experts),
        dense_formats=dict(Counter(matrix_formats(content))),
        dense_tensors=len(content.placed),
        dense_bytes=content.dense_bytes,
        expert_bytes=content.layout.bytes,
        layer_bytes=content.layer_bytes,
        copied=tuple(path.name for path in content.copies),
        dropped=tuple(content.source["dropped"]),
        calibrated=content.source.get("calibrated", ""),
        resumed=resumed,
        free=files.free_bytes(dest),
    )


def describe(formats: ExpertFormats) -> str:
    each = [str(formats.gate), str(formats.up), str(formats.down)]
    return each[0] if len(set(each)) == 1 else "gate {}, up {}, down {}".format(*each)


def matrix_formats(content: Content) -> list[str]:
    """ "4-bit g64" or "BF16", one entry a matrix."""
    vectors = {shape.name for shape in dense_shapes(content.variant) if not shape.is_matrix}
    formats = []
    for name, tensor in content.placed.items():
        base = name.removesuffix(".weight")
        if tensor.dtype in ("U32", "F8_E4M3"):
            formats.append(coded_format(tensor, content.placed[f"{base}.scales"], f"{base}.biases" in content.placed))
        elif name.endswith(".weight") and name not in vectors:
            formats.append(tensor.block or tensor.dtype)
    return formats


def coded_format(weight: DenseTensor, scales: DenseTensor, affine: bool) -> str:
    columns = weight.shape[-1] * 32 // weight.bits if weight.bits else weight.shape[-1]
    if affine:
        return f"{weight.bits}-bit g{columns // scales.shape[-1]}"
    rows = weight.bytes * 8 // (weight.bits or 8) // columns
    each = (QuantFormat.floats(name) for name in QuantFormat.float_types())
    own = (weight.dtype, weight.bytes // rows, scales.bytes // rows)
    return next(
        str(format)
        for format in each
        if (format.element, format.weight_row_bytes(columns), format.scale_row_bytes(columns)) == own
    )


# ---- After ------------------------------------------------------------------------------------------------------


def compare(content: Content, partial: Path, check: str, progress: Progress) -> int:
    """Makes experts (and for "full" dense tensors) once more from the source and compares bytes. Returns how many
    experts it compared."""
    if check == "none":
        return 0
    last = content.variant.experts.count - 1
    chosen = range(last + 1) if check == "full" else sorted({0, min(1, last), (last + 1) // 2, last})
    size = content.layout.bytes
    layers = content.variant.moe_layers
    written = [partial / packed.WEIGHTS]
    written += [partial / packed.EXPERTS_DIRECTORY / packed.layer_file(layer) for layer in layers]
    total = len(chosen) * size * len(layers) + (content.dense_bytes if check == "full" else 0)
    with SpanReader(written) as reader, progress.task("check", total) as task:
        for file, layer in enumerate(layers, start=1):
            for expert in chosen:
                expected = content.read_experts(layer, expert, 1)
                equal(reader, file, expert * size, expected, f"expert {expert}")
                task.advance(size)
        for unit in content.dense if check == "full" else ():
            offsets = [content.placed[tensor.name].offset for tensor in unit.tensors]
            for parts in unit.produce():
                for i, part in enumerate(parts):
                    equal(reader, 0, offsets[i], part, unit.tensors[i].name)
                    offsets[i] += len(part)
                    task.advance(len(part))
    return len(chosen) * len(layers)


def equal(reader: SpanReader, file: int, offset: int, expected: np.ndarray, what: str) -> None:
    found = reader.read(file, offset, len(expected))
    if not np.array_equal(found, expected):
        at = offset + int(np.flatnonzero(found != expected)[0])
        raise IoError(f"{reader.files[file]}: {what}: expected the source's bytes, found others from byte {at} on")
