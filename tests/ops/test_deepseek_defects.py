"""Three formulas of an older engine were wrong for DeepSeek models. Each is put back here, and must be noticed.

They hide well: most dimensions are not rotated, so short texts stay fluent with all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from golden.checkpoints import token_ids
from moeflux import oracle
from moeflux.models.presets import preset
from moeflux.oracle import model, ops
from support import reference_weights
from support.agreement import disagreement, golden_logits

Patch = Callable[[pytest.MonkeyPatch], None]


def factor_inside_the_power(patch: pytest.MonkeyPatch) -> None:
    """Interpolated frequencies as 1 / (factor * base)^(2i/d) instead of 1 / (factor * base^(2i/d))."""
    patch.setattr(ops, "interpolated_frequencies", old_interpolated_frequencies)


def old_interpolated_frequencies(rotary_dim: int, theta: float, factor: float) -> np.ndarray:
    return (factor * theta) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def scale_without_mscale(patch: pytest.MonkeyPatch) -> None:
    """Softmax scale as 1 / sqrt(d) without m(factor, mscale_all_dim) squared."""
    patch.setattr(model, "latent_scale", lambda head_dim, turn: 1.0 / math.sqrt(head_dim))


def split_halves(patch: pytest.MonkeyPatch) -> None:
    """Pairs (i, i + d/2) on weights whose pairs are (2i, 2i + 1)."""
    patch.setattr(ops, "rope_pairs", lambda half, interleaved: (slice(0, half), slice(half, 2 * half)))


def logits(name: str) -> np.ndarray:
    variant, weights = reference_weights.load(name)
    return oracle.Session(variant, weights).prefill(token_ids(name))


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_plain_q"])
@pytest.mark.parametrize("defect", [factor_inside_the_power, scale_without_mscale, split_halves])
def test_old_formula_loses_agreement(name: str, defect: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = golden_logits(f"{name}/hf")
    assert disagreement(logits(name), golden) == ""
    defect(monkeypatch)
    assert disagreement(logits(name), golden) != ""


# i: right, old; for the published 671B shape.
INVERSE_FREQUENCIES = {
    10: (5.62341325e-2, 5.62341325e-2),
    12: (2.68793601e-2, 2.79776057e-2),
    16: (5.5000e-3, 6.11437e-3),
    20: (7.90569e-4, 9.72288e-4),
    22: (1.77828e-4, 2.66754e-4),
    23: (3.33380e-5, 9.40848e-5),
    24: (2.5e-5, 6.28717e-5),
    27: (1.05424e-5, 1.87613e-5),
    31: (3.33380e-6, 3.74114e-6),
}


def test_frequencies_of_the_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = preset("Cogito-V2-671B").layers[0].mixer.rope
    right = oracle.rope_frequencies(turn)
    factor_inside_the_power(monkeypatch)
    old = oracle.rope_frequencies(turn)
    assert right.shape == old.shape == (32,)
    for i, expected in INVERSE_FREQUENCIES.items():
        assert (right[i], old[i]) == pytest.approx(expected, rel=6e-6), i


def test_scales_of_the_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = preset("Cogito-V2-671B").layers[0].mixer
    assert model.latent_scale(mixer.head_dim, mixer.rope) == pytest.approx(0.1352338, rel=1e-6)
    assert oracle.rope_magnitude(mixer.rope) == 1.0
    scale_without_mscale(monkeypatch)
    assert model.latent_scale(mixer.head_dim, mixer.rope) == pytest.approx(0.0721688, rel=1e-6)


def test_pairs_of_neighbours() -> None:
    """One pair at a time: channels 2i and 2i + 1 turn together by position * frequency i, and no other moves."""
    frequencies = oracle.rope_frequencies(preset("Cogito-V2-671B").layers[0].mixer.rope)
    positions = np.array([4097])
    for i in (0, 11, 31):
        x = np.zeros((1, 1, 64))
        x[0, 0, 2 * i] = 1.0
        turned = oracle.rope(x, positions, frequencies, interleaved=True)[0, 0]
        angle = 4097 * frequencies[i]
        assert turned[2 * i : 2 * i + 2] == pytest.approx([math.cos(angle), math.sin(angle)])
        assert np.count_nonzero(turned) == 2
