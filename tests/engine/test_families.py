"""Families whose parts others have too: each once through every way that must change no bit. What a part computes, the
tests of parts say; what a family computes, its golden logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import moeflux
from support.engine import Folder, folders, load_faulty, steps, tokens
from support.mlx_folder import write_mlx_folder

NAMES = (
    "minimax_m2", "qwen2_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v32", "glm_moe_dsa",
    "gpt_oss", "gemma4", "qwen4_exp_linear", "qwen4_exp_other",
)  # fmt: skip
PROMPT, TAIL, OTHER = tokens(20), tokens(5, seed=9), tokens(13, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("families"))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def everything(model: moeflux.Model) -> np.ndarray:
    session = model.session(max_context=64)
    return np.concatenate([session.prefill(PROMPT, logits="all"), steps(session, TAIL)])


def test_settings_and_stores_change_no_bit(folder: Folder, tmp_path: Path, name: str) -> None:
    """Chunks, the fewest slots, threads, look-ahead, and the layout of MLX in its place."""
    expected = everything(load_faulty(folder(name)))
    fewest = moeflux.open_store(folder(name)).variant.experts.per_token
    for settings in ({"chunk": 7, "threads": 2}, {"expert_slots": fewest, "look_ahead": "on", "readers": 2}):
        assert np.array_equal(everything(load_faulty(folder(name), **settings)), expected), settings
    mlx = write_mlx_folder(folder(name), tmp_path / "mlx")
    assert np.array_equal(everything(moeflux.load(mlx, threads=1)), expected)
    session = load_faulty(folder(name)).session(max_context=64)
    assert np.array_equal(steps(session, PROMPT + TAIL), expected)


def test_company_and_the_past_change_no_bit(folder: Folder, name: str) -> None:
    model = load_faulty(folder(name))
    alone, other = everything(model), model.session(max_context=64).prefill(OTHER, logits="all")
    one, two = (model.session(max_context=64) for _ in range(2))
    found = model.evaluate([(one, PROMPT), (two, OTHER)])
    assert np.array_equal(found[0].numpy(), alone[len(PROMPT) - 1])
    assert np.array_equal(found[1].numpy(), other[-1])
    one.checkpoint()
    saved = one.snapshot()
    for _ in range(2):
        assert np.array_equal(steps(one, TAIL), alone[len(PROMPT) :])
        one.rewind(len(PROMPT))
    two.restore(saved)
    assert np.array_equal(steps(two, TAIL), alone[len(PROMPT) :])


def test_windows_have_no_wire_format(folder: Folder, tmp_path: Path) -> None:
    """It knows one kind of layers with rows."""
    session = load_faulty(folder("gpt_oss")).session(max_context=64)
    session.prefill(PROMPT)
    for version in (1, 2):
        with pytest.raises(moeflux.FormatError, match="found another pattern, which this format cannot say"):
            session.snapshot().save(tmp_path / "saved.bin", format=f"wire-{version}")
    assert not list(tmp_path.iterdir())


def test_drafts_change_no_bit(folder: Folder, name: str) -> None:
    """Tokens that drafts foresee and tokens that they do not, both from a prompt that says itself again."""
    ids = [*PROMPT, *PROMPT[:9], *OTHER[:2], *PROMPT[2:11], *TAIL]
    expected = steps(load_faulty(folder(name)).session(max_context=64), ids)
    session = load_faulty(folder(name), speculate="lookup").session(max_context=64)
    assert np.array_equal(steps(session, ids), expected)
    assert 0 < session.total_stats.accepted < session.total_stats.drafted
