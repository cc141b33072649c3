"""Perplexity and divergence are what their definitions say, whatever the chunks. Equal models have no divergence."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import ArgumentError, builtin
from moeflux.cli import main
from moeflux.measure import reading as module
from moeflux.measure.compare import compare, share_of_budget
from moeflux.measure.evaluate import evaluate
from moeflux.measure.reading import Mean

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model() -> moeflux.Model:
    return moeflux.load(builtin.path(), threads=2)


@pytest.fixture(scope="module")
def tokens(model: moeflux.Model) -> list[int]:
    return model.tokenizer.encode((builtin.path() / "MODEL_CARD.md").read_text())[:230]


def expected_of(model: moeflux.Model, ids: list[int]) -> np.ndarray:
    """log p of every possible next token after each of `ids`, straight from the logits of one call."""
    logits = model.session().prefill(ids, logits="all").astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_loss_is_the_mean_of_minus_log_p(model: moeflux.Model, tokens: list[int]) -> None:
    found = evaluate(model, tokens, window=100)
    losses = []
    for start in (0, 100, 200):
        ids = tokens[start : start + 100]
        expected = expected_of(model, ids)
        losses.append([-expected[at, ids[at + 1]] for at in range(len(ids) - 1)])
    together = [loss for window in losses for loss in window]
    assert (found.tokens, found.windows) == (99 + 99 + 29, 3)
    assert found.loss.value == pytest.approx(np.mean(together), rel=1e-12)
    assert found.perplexity.value == pytest.approx(math.exp(np.mean(together)), rel=1e-12)
    mean, counts = np.mean(together), [len(window) for window in losses]
    squares = sum((sum(window) - mean * len(window)) ** 2 for window in losses)
    assert found.loss.error == pytest.approx(math.sqrt(squares * 3 / 2) / sum(counts), rel=1e-9)
    assert found.perplexity.error == pytest.approx(found.perplexity.value * found.loss.error, rel=1e-12)


def test_with_an_overlap_every_token_counts_once(model: moeflux.Model, tokens: list[int]) -> None:
    found = evaluate(model, tokens, window=100, overlap=30)
    losses = []
    for start in (0, 70, 140):
        ids = tokens[start : start + 100]
        expected = expected_of(model, ids)
        losses += [-expected[at, ids[at + 1]] for at in range(29 if start else 0, len(ids) - 1)]
    assert found.tokens == len(losses) == len(tokens) - 1
    assert found.loss.value == pytest.approx(np.mean(losses), rel=1e-12)


def test_divergence_is_that_of_the_definition(model: moeflux.Model, tokens: list[int]) -> None:
    fewer = moeflux.load(builtin.path(), threads=2, experts_per_token=2)
    found = evaluate(fewer, tokens[:101], window=101, reference=model)
    mine, theirs = (expected_of(each, tokens[:100]) for each in (fewer, model))
    apart = (np.exp(theirs) * (theirs - mine)).sum(axis=-1)
    assert found.divergence is not None and found.agreement is not None and found.difference is not None
    assert found.divergence.value == pytest.approx(apart.mean(), rel=1e-9)
    assert found.worst == pytest.approx(apart.max(), rel=1e-9)
    assert found.agreement.value == (mine.argmax(axis=-1) == theirs.argmax(axis=-1)).mean()
    right = np.array(tokens[1:101])
    assert found.difference.value == pytest.approx((theirs - mine)[np.arange(100), right].mean(), rel=1e-9)
    assert found.divergence.error is None and found.lossy != ()
    assert "one window" in str(found) and "LOSSY" in str(found)


def test_equal_models_are_no_distance_apart(model: moeflux.Model, tokens: list[int]) -> None:
    streamed = moeflux.load(builtin.path(), threads=1, expert_slots=24)
    found = evaluate(streamed, tokens, window=64, reference=model)
    assert found.divergence == Mean(0.0, 0.0) and found.difference == Mean(0.0, 0.0)
    assert found.agreement == Mean(1.0, 0.0) and found.worst == 0.0


def test_sixteen_bits_cost_a_thousandth_of_perplexity_at_most(tokens: list[int]) -> None:
    fast, exact = (moeflux.load(builtin.path(), precision=precision) for precision in ("auto", "exact"))
    found = evaluate(fast, tokens, window=64, reference=exact)
    assert abs(math.expm1(found.difference.value)) < 1e-3
    assert found.divergence.value < 1e-6


@pytest.mark.parametrize(("kv_dtype", "words"), [("bf16", "bf16"), ("q8", "codes of 8 bits")])
def test_rounded_keys_and_values_are_named(model: moeflux.Model, tokens: list[int], kv_dtype: str, words: str) -> None:
    found = evaluate(model, tokens[:101], window=50, reference=model, kv_dtype=kv_dtype)
    assert found.lossy == (f"keeps keys and values in {words}, not f32",) and str(found).count("LOSSY") == 1
    assert found.divergence is not None and 0 < found.divergence.value < 1e-3


def test_chunks_change_nothing(model: moeflux.Model, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens[:110]
    whole = evaluate(model, tokens, window=60, overlap=25)
    monkeypatch.setattr(module, "ROOM", 0)
    monkeypatch.setattr(module, "ROWS", 7)
    found = evaluate(model, tokens, window=60, overlap=25)
    assert found.tokens == whole.tokens
    assert found.loss.value == pytest.approx(whole.loss.value, rel=1e-13)


def test_progress_counts_tokens(model: moeflux.Model, tokens: list[int]) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(model, tokens, window=100, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (230, 230)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"window": 1}, "window"), ({"overlap": 1023}, "overlap of at most two less"), ({"overlap": -1}, "overlap")],
)
def test_windows_that_cannot_be(model: moeflux.Model, tokens: list[int], options: dict, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        evaluate(model, tokens, **options)
    with pytest.raises(ArgumentError, match="at least 2 tokens"):
        evaluate(model, tokens[:1])


def test_figures_have_the_digits_that_count() -> None:
    assert str(Mean(3.42961, 0.0312)) == "3.430 +- 0.031"
    assert str(Mean(418.343, 54.239)) == "418 +- 54"
    assert str(Mean(-0.0014317, 0.00079)) == "-0.00143 +- 0.00079"
    assert str(Mean(0.0, 0.0)) == "0.0000 +- 0.0000"
    assert str(Mean(30.8567, None)) == "30.86"


# ---- The command ------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: Output) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a little fox who lived in a village by the sea. " * 8)
    assert main(["eval", "--text", str(text), "--window", "50"]) == 0
    assert "perplexity" in capsys.readouterr().out
    store = str(builtin.path())
    flags = ["--window", "40", "--overlap", "10", "--tokens", "90", "--kv-dtype", "bf16", "--json"]
    assert main(["eval", store, "--text", str(text), "--reference", store, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["windows"], found["window"], found["overlap"]) == (89, 3, 40, 10)
    assert found["divergence"]["value"] > 0 and found["perplexity"]["error"] > 0
    assert found["reference"].startswith("moeflux-48m, ")


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (None, [], "No such file"),
        (b"", [], "expected some text, found none"),
        (b"\xff", [], "expected UTF-8, found byte 0"),
        (b"word", ["--window", "1"], "window: expected at least 2"),
        (b"a", ["--tokens", "1"], "at least 2 tokens, found 1"),
        (b"word", ["--reference", "/nowhere"], "/nowhere: expected a folder"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    content: bytes | None, flags: list[str], words: str, tmp_path: Path, capsys: Output
) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert main(["eval", "--text", str(tmp_path / "text"), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moeflux eval: ") and words in error and error.count("\n") == 1


# ---- Several models ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("Once upon a time there was a little fox who lived in a village by the sea. " * 8)
    return path


def test_a_comparison_has_the_figures_of_each_pair(model: moeflux.Model, tokens: list[int]) -> None:
    fewer, one = (moeflux.load(builtin.path(), threads=2, experts_per_token=count) for count in (2, 1))
    tokens = tokens[:110]
    found = compare([("two", fewer), ("own", model), ("one", one)], tokens, reference=1, window=50, overlap=10)
    assert [each.model for each in found.models] == ["two", "own", "one"] and found.models[1].divergence is None
    for each, loaded in zip(found.models, (fewer, model, one), strict=True):
        alone = evaluate(loaded, tokens, reference=model, window=50, overlap=10)
        assert (found.tokens, found.windows, each.lossy) == (alone.tokens, alone.windows, alone.lossy)
        assert each.perplexity == alone.perplexity and found.reference == alone.reference
        if loaded is not model:
            assert (each.divergence, each.agreement, each.difference) == (
                alone.divergence,
                alone.agreement,
                alone.difference,
            )
            assert each.worst == alone.worst
    assert found.models[2].divergence.value > found.models[0].divergence.value > 0


def test_bits_are_those_of_all_weights(model: moeflux.Model, tokens: list[int]) -> None:
    """Counted from the files: what is not there to be read takes no bits."""
    (each, _) = compare([("a", model), ("b", model)], tokens[:40]).models
    stored = json.loads((builtin.path() / "model_weights.json").read_text())["tensors"]
    count = 3 * 384 * 128 * 32 * 8
    for name, entry in stored.items():
        if not name.endswith((".scales", ".biases")):
            words = math.prod(entry["shape"])
            count += words * 32 // entry["bits"] if entry["dtype"] == "U32" else words
    size = sum(path.stat().st_size for path in (builtin.path() / "packed_experts").glob("*.bin"))
    size += sum(entry["size"] for entry in stored.values())
    assert each.bytes == size and each.bits == pytest.approx(8 * size / count, rel=1e-12)
    assert each.experts == "4-bit g64"


def test_a_vocabulary_of_another_size_is_refused(model: moeflux.Model, tokens: list[int], tmp_path: Path) -> None:
    variant = moeflux.PRESETS["Qwen3.6-35B-A3B"].with_layers(1).with_parts(moeflux.layers.RoutedExperts, count=8)
    moeflux.synth(tmp_path / "other", dataclasses.replace(variant, vocab_size=512))
    other = moeflux.load(tmp_path / "other", context=1024)
    with pytest.raises(ArgumentError, match=r"expected a vocabulary of 8192, .* found 512"):
        compare([("own", model), ("other", other)], tokens)


def test_shares_of_a_budget_end_with_all_of_it() -> None:
    assert [share_of_budget(1000, place, 3) for place in range(3)] == [333, 666, 1000]


def test_the_command_compares_several(text: Path, capsys: Output) -> None:
    store = str(builtin.path())
    flags = ["--text", str(text), "--window", "40", "--tokens", "90", "--threads", "1"]
    assert main(["eval", store, store, *flags]) == 0
    out = capsys.readouterr().out
    assert "reference  moeflux-48m, " in out and "bits" in out
    rows = [line for line in out.splitlines() if line.startswith(store)]
    assert len(rows) == 2 and "4-bit g64" in rows[0] and rows[1].endswith("100.00% +- 0.00%")
    other = str(builtin.path() / ".." / builtin.path().name)  # another name of the same model
    assert main(["eval", store, store, "--reference", other, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["model"] for each in found["models"]] == [store, store, other]
    assert found["models"][0]["divergence"] == {"value": 0.0, "error": 0.0}
    assert found["models"][2]["divergence"] is None and found["tokens"] == 87
