"""Numbers made MXFP4: the nearest codes, and of two scales the one of the smaller error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden import checkpoints
from golden.elements import from_bf16, from_mxfp4
from moeflux import FormatError, QuantFormat, _core, oracle
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.conversion.verify import verify
from moeflux.oracle.stored import float_numbers
from moeflux.stores.store import open_store

MXFP4 = QuantFormat.mxfp4()
EXPERT = "model.layers.2.mlp.experts.5"
SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
RNG = np.random.default_rng(5)


def numbers_of(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    return float_numbers(*parts, MXFP4).astype(np.float64)


def nearest(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Of two that are as near, the one with the even code."""
    sizes = np.abs(values) / scale
    off = np.abs(sizes[..., None] - SIZES)
    order = off + np.array([0, 1, 0, 1, 0, 1, 0, 1]) * 1e-12
    return np.copysign(SIZES[order.argmin(axis=-1)], values) * scale


@pytest.mark.parametrize("kind", ["normal", "halves", "small", "weighted"])
def test_codes_are_the_nearest_and_the_scale_is_the_better_one(kind: str) -> None:
    values = RNG.standard_normal((40, 96)).astype(np.float32)
    values = {"halves": np.round(values * 8) / 8, "small": values * np.float32(1e-36)}.get(kind, values)
    values[3, 32:64] = 0
    weights = RNG.uniform(0, 1, 96).astype(np.float32) ** 4 if kind == "weighted" else None
    found = numbers_of(_core.quantize(values, MXFP4, 1, weights)).reshape(40, 3, 32)
    groups, importance = values.reshape(40, 3, 32).astype(np.float64), np.ones(96) if weights is None else weights
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    lower = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2)
    tries = [nearest(groups, scale) for scale in (lower, 2 * lower)]
    errors = [((each - groups) ** 2 * importance.reshape(3, 32)).sum(axis=-1) for each in tries]
    wanted = np.where((errors[1] < errors[0])[..., None], tries[1], tries[0])
    clear = np.abs(errors[1] - errors[0]) > 1e-5 * errors[0]
    assert clear.mean() > 0.9 and (errors[1] < errors[0]).any() and (errors[1] > errors[0]).any()
    assert np.array_equal(found[clear], wanted[clear])


def test_numbers_that_are_mxfp4_come_back(tmp_path: Path) -> None:
    tensors = checkpoints.CHECKPOINTS["gpt_oss"]().tensors
    at = "model.layers.1.mlp.experts.down_proj"
    values = from_mxfp4(tensors[f"{at}_blocks"][1], tensors[f"{at}_scales"][1]).astype(np.float32)
    rows = np.ascontiguousarray(values.reshape(-1, values.shape[-1]))
    assert np.array_equal(numbers_of(_core.quantize(rows, MXFP4)), rows)


def test_threads_and_types_change_nothing() -> None:
    values = RNG.standard_normal((700, 256)).astype(np.float16)
    alone = _core.quantize(values, MXFP4, 1)
    for given, threads in ((values, 3), (values.astype(np.float32), 2)):
        for part, expected in zip(_core.quantize(given, MXFP4, threads), alone, strict=True):
            assert np.array_equal(part, expected)


def test_what_is_no_number_is_named() -> None:
    values = np.zeros((9, 64), np.float32)
    values[4, 40] = np.inf
    with pytest.raises(FormatError, match=r"row 4, columns 32 to 63: expected finite numbers, found inf in column 40"):
        _core.quantize(values, MXFP4)


def test_experts_of_any_checkpoint(tmp_path: Path) -> None:
    """The other matrices stay as they are."""
    source, made = checkpoints.write("qwen3_moe", tmp_path / "hf"), tmp_path / "packed"
    convert(source, made, format=ConvertFormat.asked("mxfp4"), check="full")
    assert verify(made).ok
    published = from_bf16(checkpoints.CHECKPOINTS["qwen3_moe"]().tensors[f"{EXPERT}.up_proj.weight"][1])
    with open_store(made) as store:
        up = store.expert(2, 5)[1]
        assert up.format == MXFP4 and np.array_equal(oracle.widen(up), numbers_of(_core.quantize(published, MXFP4)))
        assert not store.tensor("model.layers.2.self_attn.q_proj").format.is_quantised
    with moeflux.load(made, threads=1, sessions=1) as model:
        assert np.isfinite(np.array(model.session().prefill([1, 2, 3]))).all()
