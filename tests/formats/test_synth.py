"""Synthetic stores: one seed, one sequence of bytes; they open, their config is right, they behave like models."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from golden.checkpoints import CHECKPOINTS
from moeflux import FormatError, QuantFormat, StateError, Variant, oracle
from moeflux.conversion.synth import SPREAD, noise, popularity, stream, synth, values_of
from moeflux.conversion.verify import verify
from moeflux.models.config import variant_from_config
from moeflux.models.layers import RoutedExperts
from moeflux.models.presets import PRESETS
from moeflux.models.write_config import NOT_IN_CONFIG, config_of
from moeflux.stores.storage import ConvertFormat
from moeflux.stores.store import open_store
from support.agreement import config_of as config_of_checkpoint
from support.flat import changed
from support.small_variants import DEEPSEEK, QWEN


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tiny_variants() -> list[Variant]:
    return [variant_from_config(config_of_checkpoint(name)) for name in CHECKPOINTS]


def same_shape(variant: Variant) -> dict[str, object]:
    return {key: value for key, value in variant.to_dict().items() if key not in NOT_IN_CONFIG}


@pytest.mark.parametrize("variant", [*PRESETS.values(), *tiny_variants()], ids=lambda variant: variant.name or "tiny")
def test_config_reads_back(variant: Variant) -> None:
    config = json.loads(json.dumps(config_of(variant)))
    assert same_shape(variant_from_config(config)) == same_shape(variant)


def test_inexpressible_variant_is_refused() -> None:
    with pytest.raises(FormatError, match=r"layers\[1\].feed_forward"):
        config_of(changed(DEEPSEEK, mlp_kinds=("moe", "dense", "moe", "moe", "moe")))


@pytest.mark.parametrize("variant", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_deterministic_and_sound(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = synth(tmp_path / "first", variant, seed=7)
    monkeypatch.setattr("moeflux.conversion.packer.GROUP_BYTES", 40_000)
    monkeypatch.setattr("moeflux.conversion.packer.worker_count", lambda: 1)
    again = synth(tmp_path / "again", variant, seed=7)
    other = synth(tmp_path / "other", variant, seed=8)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert files_of(tmp_path / "first") == files_of(tmp_path / "again")
    assert verify(tmp_path / "first").ok
    with open_store(tmp_path / "first") as store:
        assert store.variant == variant
    assert same_shape(variant_from_config(tmp_path / "first")) == same_shape(variant)


def test_experts_differ(tmp_path: Path) -> None:
    synth(tmp_path / "store", QWEN)
    sums = json.loads((tmp_path / "store" / "moeflux.json").read_text())["expert_sha256"]
    assert len({each for layer in sums.values() for each in layer}) == 4 * 32


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8, "bf16", "f16", "f32"])
def test_noise_has_the_asked_size(bits: int | str) -> None:
    """Zero mean and the asked deviation in every format; half of the scales are negative."""
    storage = ConvertFormat.asked(bits, 32).dense
    parts = noise(stream(1, "x"), 512, 256, storage, 0.05)
    values = values_of(parts, storage, 256)
    assert values.shape == (512, 256)
    assert abs(float(values.std()) / 0.05 - 1) < 0.04
    assert abs(float(values.mean())) < 0.001
    if storage.is_affine:
        assert 0.4 < float((parts[1].view("<u2") >> 15).mean()) < 0.6


def test_formats(tmp_path: Path) -> None:
    asked = ConvertFormat(experts=QuantFormat.affine(2, 32), dense=QuantFormat.plain("BF16"))
    synth(tmp_path / "store", QWEN, format=asked)
    with open_store(tmp_path / "store") as store:
        assert store.directory.experts.formats.down == QuantFormat.affine(2, 32)
        assert store.directory.formats["lm_head"] == QuantFormat.plain("BF16")


def test_refuses_to_overwrite(tmp_path: Path) -> None:
    synth(tmp_path / "store", QWEN)
    with pytest.raises(StateError, match="force"):
        synth(tmp_path / "store", QWEN)
    synth(tmp_path / "store", QWEN, seed=1, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


@pytest.mark.parametrize("variant", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_behaves_like_a_model(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 128 tokens: activations keep their size, every layer uses nearly all experts, some more than others."""
    synth(tmp_path / "store", variant)
    chosen: dict[int, list[np.ndarray]] = {}
    route = oracle.model.route

    def watching(e: RoutedExperts, weights: object, at: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, shares = route(e, weights, at, x)
        chosen.setdefault(int(at.split(".")[2]), []).append(np.atleast_2d(ids))
        assert 0.5 < np.sqrt((np.asarray(x) ** 2).mean()) < 2
        return ids, shares

    monkeypatch.setattr(oracle.model, "route", watching)
    ids = np.random.default_rng(0).integers(0, variant.vocab_size, 128).tolist()
    with open_store(tmp_path / "store") as store:
        logits = np.asarray(oracle.Session(store.variant, store).prefill(ids))
    assert np.isfinite(logits).all() and 1 < logits.std() < 5
    assert sorted(chosen) == list(variant.moe_layers)
    for layer in chosen:
        picks = np.concatenate(chosen[layer])
        counts = np.bincount(picks.ravel(), minlength=variant.experts.count)
        assert np.count_nonzero(counts) >= 0.8 * variant.experts.count
        assert 1.5 < counts.max() / counts.mean() < 8
        popular = popularity(variant, 0, layer) > SPREAD
        assert popular.sum() == variant.experts.count // 8
        assert counts[popular].mean() > 1.5 * counts[~popular].mean()
        repeated = np.mean([len(set(a) & set(b)) / len(a) for a, b in pairwise(picks)])
        assert 0.1 < repeated < 0.6
