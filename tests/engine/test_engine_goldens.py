"""The engine itself gives the logits of transformers and mlx-lm, and every width and group meets the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden.checkpoints import CHECKPOINTS, MLX, TRANSFORMERS, token_ids, write
from moeflux import oracle
from moeflux.conversion.convert import convert
from moeflux.stores.storage import ConvertFormat
from moeflux.stores.store import open_store
from support.agreement import golden_logits, mlx_type, own_type
from support.engine_logits import LARGEST_INT16_ERROR, LARGEST_ORACLE_ERROR, assert_meets
from support.mlx_folder import write_mlx_folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write(name, root / name) for name in CHECKPOINTS}


def engine_logits(store: Path, name: str) -> np.ndarray:
    return moeflux.load(store, threads=2, precision="exact").session().prefill(token_ids(name), logits="all")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_plain_weights_are_transformers(checkpoint: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Nothing is quantised: stored in the checkpoint's own type."""
    convert(checkpoint[name], tmp_path / "plain", format=own_type(name), check="none")
    found = engine_logits(tmp_path / "plain", name)
    with open_store(tmp_path / "plain") as store:
        assert_meets(found, oracle.Session(store.variant, store).prefill(token_ids(name)), LARGEST_ORACLE_ERROR)
    assert_meets(found, golden_logits(f"{name}/hf"))


@pytest.mark.parametrize("name", MLX)
def test_four_bits_are_mlx(checkpoint: dict[str, Path], tmp_path: Path, name: str) -> None:
    convert(checkpoint[name], tmp_path / "packed", format=mlx_type(name), check="none")
    folder = write_mlx_folder(tmp_path / "packed", tmp_path / "mlx", rounded=True)
    assert_meets(engine_logits(folder, name), golden_logits(f"{name}/mlx"))


@pytest.mark.parametrize("group_size", (32, 64, 128))
@pytest.mark.parametrize("bits", (2, 3, 4, 5, 6, 8))
def test_every_width_and_group_meets_the_oracle(
    checkpoint: dict[str, Path], tmp_path: Path, bits: int, group_size: int
) -> None:
    """Prefill and step: they have kernels of their own. The model's experts are 128 wide, so every group fits."""
    convert(checkpoint["qwen3_next"], tmp_path / "q", format=ConvertFormat.asked(bits, group_size), check="none")
    ids = token_ids("qwen3_next")[25:49]  # at none of which two experts are nearly tied, whatever the format
    with open_store(tmp_path / "q") as store:
        gate = store.directory.experts.formats.gate
        assert (gate.bits, gate.group_size) == (bits, group_size)
        expected = oracle.Session(store.variant, store).prefill(ids)
    for precision, largest in (("exact", LARGEST_ORACLE_ERROR), ("auto", LARGEST_INT16_ERROR)):
        session = moeflux.load(tmp_path / "q", threads=2, precision=precision).session()
        found = session.prefill(ids[:20], logits="all")
        found = np.concatenate([found, np.stack([session.step(token).numpy() for token in ids[20:]])])
        assert_meets(found, expected, largest)
