"""A random packed store of any shape: for tests, benchmarks and trying things out without a download.

The numbers are noise with the statistics of a working model. Every matrix maps input of size 1 to output of a chosen
size (`output_size`), small where it is added to the residual stream, so activations neither grow nor vanish. The
embedding holds a direction that all tokens share; a softmax router looks at it with another strength for each expert,
and a noaux_tc router has its bias: some experts are popular, as in trained models.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeflux._core import ExpertLayout, dequantize, quantize
from moeflux.conversion.block_noise import block_noise
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
from moeflux.conversion.packer import Content, DenseUnit
from moeflux.errors import ArgumentError, found
from moeflux.models.layers import GroupedAttention, LatentAttention
from moeflux.models.tensors import DenseShape, dense_shapes
from moeflux.models.variants import QuantFormat, Variant
from moeflux.models.write_config import config_of
from moeflux.progress import Progress, Silent, time_text
from moeflux.sizes import size_text
from moeflux.stores.floats import FLOAT_BYTES, decode, encode
from moeflux.stores.packed import DenseTensor
from moeflux.stores.storage import ConvertFormat, matrix_tensors

__all__ = ["SynthReport", "synth"]

BLOCK_ELEMENTS = 4 << 20  # of a dense matrix in memory at a time, per thread

PLAIN = QuantFormat.plain("F32")

# Sizes (root mean square) of what the parts of a layer yield for input of size 1, measured on random weights.
SWIGLU = 0.6
LATENT, GATED = 0.6, 0.45
SHARED = 0.4  # size of the shared direction, where the part that is a token's own has size 1
SPREAD, POPULAR = 0.4, 0.75
"""In deviations of a router's logits: all experts lie within +-SPREAD, and an eighth of them have POPULAR more."""
ADDED_NORMS = (".post_attention_layernorm.weight", ".post_feedforward_layernorm.weight")
"""Of what is added to the stream, in a model that norms that."""
GROWTH = 1.5  # measured: how much the square of the residual stream grows over all layers, in squares of the embedding


@dataclass(frozen=True)
class SynthReport:
    path: Path
    variant: Variant
    format: ConvertFormat
    seed: int
    bytes: int
    seconds: float
    fingerprint: str

    def __str__(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9)
        v, experts = self.variant, self.variant.experts.count
        return "\n".join(
            [
                f"model     {v.name}: {v.model_type}, {v.num_layers} layers, {experts} experts, seed {self.seed}",
                f"format    {self.format}",
                f"wrote     {size_text(self.bytes)} in {time_text(self.seconds)} ({size_text(rate)}/s) to {self.path}",
                f"finger    {self.fingerprint}",
            ]
        )


def synth(
    dest: str | Path,
    variant: Variant,
    *,
    seed: int = 0,
    format: ConvertFormat | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> SynthReport:
    """Writes a random store. The same variant, format and seed give the same bytes. The default format is 4-bit g64."""
    dest, asked, progress = destination(dest), format or ConvertFormat.asked(), progress or Silent()
    if asked.keeps_fp8:
        raise ArgumentError("bits: fp8 is kept where it is published, and not made; expected others, found fp8")
    if not -(1 << 63) <= seed < 1 << 63:
        raise ArgumentError(f"seed: expected a whole number of 64 bits, found {found(seed)}")
    check_destination(None, dest, force)
    content = content_of(variant, asked, seed)
    total = content.dense_bytes + content.expert_bytes
    with reserved(dest):
        check_destination(None, dest, force)  # again: another process may have put something there meanwhile
        resumed = resumable(content, partial_of(dest), force)
        check_space(dest, total - resumed + JSON_ALLOWANCE)
        started = time.monotonic()
        with growing(content, dest, resumed, progress) as packer:
            with progress.task("synth", total) as task:
                packer.write(task)
            description = packer.describe()
    return SynthReport(dest, variant, asked, seed, total - resumed, time.monotonic() - started, description.fingerprint)


def content_of(variant: Variant, asked: ConvertFormat, seed: int) -> Content:
    experts = asked.of_experts(variant)
    config = json.dumps(config_of(variant.without_draft()), indent=2) + "\n"
    binding = {"journal": 1, "seed": str(seed), "format": str(asked), "variant": variant.to_dict()}
    hidden, intermediate = variant.hidden_size, variant.experts.intermediate
    layout = ExpertLayout(hidden, intermediate, experts.gate, experts.up, experts.down)
    sizes = expert_sizes(variant)
    storages = (experts.gate, experts.up, experts.down)
    shapes = ((variant.experts.intermediate, variant.hidden_size),) * 2 + (
        (variant.hidden_size, variant.experts.intermediate),
    )

    buffers = threading.local()  # fresh memory for every piece would cost more than the numbers do

    def read_experts(layer: int, first: int, count: int) -> np.ndarray:
        """Valid until the calling thread asks again."""
        if getattr(buffers, "data", np.empty(0)).size < count * layout.bytes:
            buffers.data = np.empty(count * layout.bytes, np.uint8)
        at = 0
        for expert in range(first, first + count):
            random = stream(seed, "experts", layer, expert)
            for (rows, columns), storage, size in zip(shapes, storages, sizes, strict=True):
                for part in noise(random, rows, columns, storage, size / columns**0.5):
                    buffers.data[at : at + len(part)] = part
                    at += len(part)
        filled: np.ndarray = buffers.data[:at]
        return filled

    return Content(
        variant=variant,
        source={"kind": "synthetic", "path": f"seed {seed}", "dropped": []},
        binding=binding,
        experts=experts,
        dense=[unit(shape, variant, asked, seed) for shape in dense_shapes(variant)],
        read_experts=read_experts,
        texts={"config.json": config},
    )


# ---- Numbers ----------------------------------------------------------------------------------------------------


def stream(seed: int, *key: str | int) -> np.random.SFC64:
    """Random bits that depend on nothing but the seed and the key, so work may be done in any order."""
    text = json.dumps([seed, *key]).encode()
    return np.random.SFC64(np.random.SeedSequence(int.from_bytes(hashlib.sha256(text).digest()[:16], "little")))


def raw_bytes(random: np.random.SFC64, size: int) -> np.ndarray:
    return random.random_raw(-(-size // 8)).view(np.uint8)[:size]


def uniform(random: np.random.SFC64, count: int) -> np.ndarray:
    """float32 in [-1, 1): 16 random bits each."""
    return raw_bytes(random, 2 * count).view("<i2").astype(np.float32) / np.float32(32768)


def noise(
    random: np.random.SFC64,
    rows: int,
    columns: int,
    storage: QuantFormat,
    deviation: float,
    shift: np.ndarray | None = None,
) -> list[np.ndarray]:
    """The bytes of a matrix of zero-mean noise, plus `shift` [rows or 1, columns in groups of 32] where given.

    Quantised: codes are random bits, scales vary by an eighth and in sign, each bias puts its group's middle on zero.
    """
    count = rows * columns
    if storage.is_mxfp4:
        # All codes alike deviate by 2.9; where a half of the groups has twice the scale of the others, by 4.6.
        words = raw_bytes(random, storage.weight_row_bytes(columns) * rows)
        exponent = round(np.log2(deviation / 4.6)) + 127
        return [words, exponent + (raw_bytes(random, storage.scale_row_bytes(columns) * rows) & 1)]
    if storage.is_blocks and shift is not None:
        return blocks_of(noise(random, rows, columns, PLAIN, deviation, shift), storage, columns)
    if storage.is_blocks:
        return [block_noise(raw_bytes(random, storage.weight_row_bytes(columns) * rows), str(storage), deviation)]
    if not storage.is_affine:
        values = uniform(random, count).reshape(rows, columns) * np.float32(deviation * 3**0.5)
        if shift is not None:
            values = values + np.repeat(shift, 32, axis=1)[:, :columns]
        return [encode(values, storage.element)]
    top = (1 << storage.bits) - 1
    code_deviation = ((4**storage.bits - 1) / 12) ** 0.5
    groups = columns // storage.group_size
    wobble = uniform(random, rows * groups).reshape(rows, groups)
    scales = (np.copysign(np.float32(0.875), wobble) + wobble / 4) * np.float32(deviation / code_deviation)
    scales = encode(scales, storage.scale_type)
    biases = decode(scales, storage.scale_type).reshape(rows, groups) * np.float32(-top / 2)
    if shift is not None:
        biases = biases + shift[:, :: storage.group_size // 32]
    words = raw_bytes(random, storage.weight_row_bytes(columns) * rows)
    return [words, scales, encode(biases, storage.scale_type)]


def blocks_of(plain: list[np.ndarray], storage: QuantFormat, columns: int) -> list[np.ndarray]:
    """The same matrix as blocks."""
    return [quantize(values_of(plain, PLAIN, columns), storage, 1)[0].reshape(-1)]


def shared_direction(variant: Variant, seed: int) -> np.ndarray:
    """One sign for each 128 columns (so that any group size can hold it), an entry for each 32: [1, hidden / 32]."""
    signs = np.where(raw_bytes(stream(seed, "direction"), variant.hidden_size // 128 + 1) & 1, 1, -1)
    return np.repeat(signs, 4)[None, : -(-variant.hidden_size // 32)].astype(np.float32)


def popularity(variant: Variant, seed: int, layer: int) -> np.ndarray:
    """Each expert's advantage, in standard deviations of the logits. It is in random order, and equally distributed in
    every group of experts."""
    random, groups = stream(seed, "popularity", layer), max(1, variant.experts.router.groups)
    levels: np.ndarray = np.linspace(-1, 1, variant.experts.count, dtype=np.float32).reshape(-1, groups)
    for _ in range(2):  # neighbours over the groups, then the levels of each group
        order = np.argsort(random.random_raw(levels.size).reshape(levels.shape), axis=1)
        levels = np.take_along_axis(levels, order, axis=1).T
    levels = levels.T.reshape(-1)
    return SPREAD * levels + np.float32(POPULAR) * (levels > 0.75)


# ---- Sizes ------------------------------------------------------------------------------------------------------


def residual_size(variant: Variant) -> float:
    """The size of what each half of a layer should add to the residual stream. The embedding begins it with size 1."""
    size: float = (2 * variant.num_layers) ** -0.5
    return size


def expert_sizes(variant: Variant) -> tuple[float, float, float]:
    """Output sizes of gate, up and down. The outputs of K experts whose weights add up to one partly cancel, to about
    K ** -0.5."""
    mixed = SWIGLU * variant.experts.per_token**-0.5 * variant.experts.router.scaling
    return 1.0, 1.0, residual_size(variant) / mixed


def sharpness(variant: Variant, layer: int) -> float:
    """By what the norms of queries and keys are larger than where scores are divided by the root of a head's size."""
    mixer = variant.layer(layer).mixer
    if not isinstance(mixer, GroupedAttention) or not mixer.scale:
        return 1.0
    root: float = (mixer.scale * mixer.head_dim**0.5) ** -0.5
    return root


def output_size(name: str, variant: Variant) -> float:
    """Root mean square of a matrix's output for input of size 1."""
    if name == "lm_head":
        return 2.0
    if name.endswith(".down_proj"):
        return residual_size(variant) / SWIGLU
    if name.endswith(".ple.value_proj"):
        return residual_size(variant)
    if name.endswith((".o_proj", ".out_proj")):
        mixer = variant.layer(int(name.split(".")[2])).mixer
        return residual_size(variant) / (LATENT if isinstance(mixer, LatentAttention) else GATED)
    return 1.0


# ---- Dense tensors ----------------------------------------------------------------------------------------------


def table_unit(wanted: DenseShape, asked: ConvertFormat, seed: int) -> DenseUnit:
    rows, columns = wanted.shape
    size = rows * columns * FLOAT_BYTES[asked.element]
    place = DenseTensor(wanted.name, asked.element, wanted.shape, size, is_table=True)

    def produce() -> Iterator[tuple[np.ndarray, ...]]:
        limit = max(1, BLOCK_ELEMENTS // columns)
        for start in range(0, rows, limit):
            count = min(limit, rows - start)
            yield (
                encode(uniform(stream(seed, wanted.name, start), count * columns) * np.float32(3**0.5), asked.element),
            )

    return DenseUnit(wanted.name, (place,), produce)


def unit(wanted: DenseShape, variant: Variant, asked: ConvertFormat, seed: int) -> DenseUnit:
    if wanted.is_table:
        return table_unit(wanted, asked, seed)
    if not wanted.is_matrix:
        element = "F32" if wanted.name.endswith(("A_log", "e_score_correction_bias")) else asked.element
        size = int(np.prod(wanted.shape)) * FLOAT_BYTES[element]
        place = DenseTensor(wanted.name, element, wanted.shape, size)
        return DenseUnit(wanted.name, (place,), lambda: iter([(encode(vector(wanted, variant, seed), element),)]))
    storage = asked.of_matrix(wanted.name, wanted.shape[-1], variant)
    places = matrix_tensors(wanted.name, wanted.shape, storage)
    return DenseUnit(wanted.name, places, lambda: matrix(wanted, variant, storage, seed))


def vector(wanted: DenseShape, variant: Variant, seed: int) -> np.ndarray:
    random = stream(seed, wanted.name)
    count = int(np.prod(wanted.shape))
    flat = uniform(random, count)
    if wanted.name.endswith("A_log"):
        return np.asarray(np.log(8.5 + 7.5 * flat))  # decay rates from 1 to 16
    if wanted.name.endswith("dt_bias"):
        step = np.exp(np.log(0.01) + np.log(10) * flat)  # time steps from 0.001 to 0.1
        return np.asarray(np.log(np.expm1(step)))
    if wanted.name.endswith("conv1d.weight"):
        return flat * np.float32((3 / wanted.shape[1]) ** 0.5)
    if wanted.name.endswith("e_score_correction_bias"):
        layer = int(wanted.name.split(".")[2])
        return np.float32(0.14) * popularity(variant, seed, layer)  # two thirds of what the scores deviate by
    if wanted.name.endswith(("q_norm.weight", "k_norm.weight")):
        # Attention scores of deviation 2: neither flat nor on one position.
        return (1.4 + 0.2 * flat) * np.float32(sharpness(variant, int(wanted.name.split(".")[2])))
    if wanted.name.endswith(("_proj.bias", ".gate.bias", "k_norm.bias")):
        return 0.5 * flat  # beside products of size 1
    if variant.experts.framed and wanted.name.endswith(ADDED_NORMS):
        return np.float32(residual_size(variant)) * (1 + 0.2 * flat)
    return 1 + 0.2 * flat


def matrix(wanted: DenseShape, variant: Variant, storage: QuantFormat, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    name, columns = wanted.name, wanted.shape[-1]
    rows = int(np.prod(wanted.shape[:-1]))
    # embed_q replaces a part of kv_b_proj, so its fan-in is the rank. An embedding row is its own output.
    fan_in = wanted.shape[1] if name.endswith(".embed_q") else 1 if name == "model.embed_tokens" else columns
    deviation = output_size(name, variant) / fan_in**0.5
    shift = None
    if name == "model.embed_tokens":
        deviation /= variant.embedding_scale
    if name == "model.embed_tokens" and variant.experts.router.scoring == "softmax":
        shift = SHARED / np.float32(variant.embedding_scale) * shared_direction(variant, seed)
    elif name.endswith(".mlp.gate") and variant.experts.router.scoring == "softmax":
        yield router(name, variant, storage, seed)
        return
    limit = max(1, BLOCK_ELEMENTS // columns)
    for start in range(0, rows, limit):
        count = min(limit, rows - start)
        yield tuple(noise(stream(seed, name, start), count, columns, storage, deviation, shift))


def router(name: str, variant: Variant, storage: QuantFormat, seed: int) -> tuple[np.ndarray, ...]:
    """Noise that is blind to the direction that all tokens share, plus as much of that direction as makes each expert
    popular."""
    rows, columns = variant.experts.count, variant.hidden_size
    if storage.is_blocks:
        return tuple(blocks_of(list(router(name, variant, PLAIN, seed)), storage, columns))
    layer = int(name.split(".")[2])
    direction = shared_direction(variant, seed)
    # A framed router takes a row of length 1, not of size 1.
    gain = columns**0.5 if variant.experts.framed else 1.0
    blind = noise(stream(seed, name), rows, columns, storage, gain * columns**-0.5)
    seen = values_of(blind, storage, columns) @ np.repeat(direction[0], 32)[:columns] / columns
    # The share of the direction in the router's input shrinks as the residual stream grows.
    size = (SHARED**2 + 1 + GROWTH * (layer + 0.5) / variant.num_layers) ** 0.5
    wanted = popularity(variant, seed, layer) * np.float32(gain * size / SHARED / columns)
    shift = (wanted - seen)[:, None] * direction
    return tuple(noise(stream(seed, name), rows, columns, storage, gain * columns**-0.5, shift))


def values_of(parts: list[np.ndarray], storage: QuantFormat, columns: int) -> np.ndarray:
    """The numbers that the bytes of a matrix stand for."""
    if not storage.is_affine:
        return decode(parts[0], storage.element).reshape(-1, columns)
    words = parts[0].view(np.uint32).reshape(-1, storage.weight_row_bytes(columns) // 4)
    kind = np.float32 if storage.scale_type == "F32" else np.uint16
    scales, biases = (part.view(kind).reshape(len(words), -1) for part in parts[1:])
    return dequantize(words, scales, biases, storage, columns, threads=1)
