"""The oracle gives the logits of transformers and mlx-lm (made by golden/make_goldens.py) at every position."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from golden.checkpoints import CHECKPOINTS, MLX, TRANSFORMERS, token_ids, write
from moeflux import oracle
from moeflux.conversion.convert import convert
from moeflux.stores.store import open_store
from support import reference_weights
from support.agreement import GOLDEN_LOGITS, config_of, disagreement, golden_logits, mlx_type, own_type
from support.mlx_folder import write_mlx_folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint's folder."""
    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: write(name, root / name))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_full_precision_is_transformers(name: str) -> None:
    variant, weights = reference_weights.load(name)
    logits = oracle.Session(variant, weights).prefill(token_ids(name))
    assert disagreement(logits, golden_logits(f"{name}/hf")) == ""


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_conversion_to_its_own_type_is_transformers(written: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    """As near as the weights themselves: not a bit of them is lost on the way."""
    convert(written(name), tmp_path / "packed", format=own_type(name), check="none")
    with open_store(tmp_path / "packed") as store:
        logits = oracle.Session(store.variant, store).prefill(token_ids(name))
    assert disagreement(logits, golden_logits(f"{name}/hf")) == ""


@pytest.mark.parametrize("name", MLX)
def test_four_bit_is_mlx(written: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    """Through conversion, MLX folder and store: codes, scales, names and layout are in this too."""
    convert(written(name), tmp_path / "packed", format=mlx_type(name), check="none")
    folder = write_mlx_folder(tmp_path / "packed", tmp_path / "mlx", rounded=True)
    with open_store(folder) as store:
        logits = oracle.Session(store.variant, store).prefill(token_ids(name))
    assert disagreement(logits, golden_logits(f"{name}/mlx")) == ""


def test_every_golden_is_used() -> None:
    with np.load(GOLDEN_LOGITS) as golden:
        names = {f"{name}/hf" for name in TRANSFORMERS} | {f"{name}/mlx" for name in MLX}
        assert set(golden.files) == names


def test_inputs_reach_what_matters() -> None:
    """Positions beyond 64, and beyond the original context where YaRN is on; golden tokens told apart with room."""
    for name in CHECKPOINTS:
        config = config_of(name)
        config = config.get("text_config", config)
        scaling = config.get("rope_scaling") or {}
        assert len(token_ids(name)) > max(64, scaling.get("original_max_position_embeddings", 0))
    with np.load(GOLDEN_LOGITS) as golden:
        for name in golden.files:
            best = np.sort(golden[name], axis=-1)[:, -2:]
            assert ((best[:, 1] - best[:, 0]) / np.ptp(golden[name])).min() > 2e-5, name


@pytest.mark.parametrize("wrong", ["shifted", "noisy", "swapped"])
def test_disagreement_is_seen(wrong: str) -> None:
    expected = golden_logits("qwen3_moe/hf").astype(np.float64)
    found = expected.copy()
    if wrong == "shifted":
        found[5:] = expected[4:-1]
    elif wrong == "noisy":
        found[7, 3] += 2e-5 * np.ptp(expected)
    else:
        best, second = np.argsort(expected[9])[[-1, -2]]
        found[9, [best, second]] = expected[9, [second, best]]
    assert disagreement(found, expected) != ""
    assert disagreement(expected, expected) == ""
