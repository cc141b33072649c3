"""The engine against the oracle and the peers' goldens, and against itself: bit-equal whatever the settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import oracle
from moeflux.conversion.synth import synth
from moeflux.stores.store import open_store
from support.engine import Folder, folders, tokens
from support.mlx_folder import write_mlx_folder
from support.tiny_stores import hybrid, latent

NAMES = ("qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3", "kimi", "glm4_moe")
COSINE = 0.99999
"""What the issue of numerics comes down to: the engine's f32 against the oracle's f64 on the same stored weights."""
TIE = 1e-3
"""Two experts so near each other, by the size of their scores, may change places when activations have 16 bits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("engine"))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize("name", NAMES)
def test_prefill_meets_the_oracle(folder: Folder, name: str) -> None:
    model = moeflux.load(folder(name), threads=2)
    ids = tokens(80, vocab=model.variant.vocab_size)
    with open_store(folder(name)) as store:
        expected = oracle.Session(store.variant, store).prefill(ids)
    found = model.session().prefill(ids, logits="all")
    worst = min(cosine(a, b) for a, b in zip(found, expected, strict=True))
    assert worst >= COSINE
    assert np.abs(found - expected).max() <= 1e-3 * np.ptp(expected)
    assert (found.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_decode_follows_the_oracle(folder: Folder, name: str) -> None:
    """40 tokens behind a prompt, across a border of blocks, each the oracle's own choice: the same choice, and logits
    close, at every one of them."""
    model = moeflux.load(folder(name), threads=2, precision="exact")
    session = model.session()
    with open_store(folder(name)) as store:
        truth = oracle.Session(store.variant, store)
        prompt = tokens(230, vocab=model.variant.vocab_size)
        expected = truth.prefill(prompt)[-1]
        found = session.prefill(prompt)
        for _ in range(40):
            assert found is not None
            assert cosine(found.numpy(), expected) >= COSINE
            token = int(expected.argmax())
            assert found.argmax() == token
            expected, found = truth.step(token), session.step(token)


def distance_to_a_tie(logits: np.ndarray, k: int, bias: np.ndarray | None, groups: int, kept: int) -> np.ndarray:
    """The gap of each row between the last expert that is chosen and the first that is not, or between such groups."""
    scores = logits if bias is None else oracle.ops.sigmoid(logits) + bias
    size = np.abs(scores).max(axis=1)
    near = np.full(len(scores), np.inf)
    if kept < groups:
        in_groups = scores.reshape(len(scores), groups, -1)
        worth = np.sort(np.sort(in_groups)[..., -2:].sum(axis=-1))
        near = worth[:, -kept] - worth[:, -kept - 1]
        out = np.sort(in_groups)[..., -2:].sum(axis=-1) < worth[:, -kept, None]
        scores = np.where(out[..., None], -np.inf, in_groups).reshape(scores.shape)
    ordered = np.sort(scores)
    return np.minimum(near, ordered[:, -k] - ordered[:, -k - 1]) / size


@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits_lose_the_oracle_only_at_ties(folder: Folder, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 tokens, those whose experts are nearly tied in no layer have the oracle's logits, on sharp models too."""
    ties: list[np.ndarray] = []
    softmax, grouped = oracle.model.route_softmax, oracle.model.route_grouped

    def route_softmax(logits: np.ndarray, k: int, **rest: bool) -> tuple[np.ndarray, np.ndarray]:
        ties.append(distance_to_a_tie(logits, k, None, 1, 1))
        return softmax(logits, k, **rest)

    def route_grouped(logits: np.ndarray, bias: np.ndarray, k: int, **rest: int) -> tuple[np.ndarray, np.ndarray]:
        ties.append(distance_to_a_tie(logits, k, bias, rest["groups"], rest["groups_kept"]))
        return grouped(logits, bias, k, **rest)

    monkeypatch.setattr(oracle.model, "route_softmax", route_softmax)
    monkeypatch.setattr(oracle.model, "route_grouped", route_grouped)
    model = moeflux.load(folder(name), threads=2)
    ids = tokens(300, vocab=model.variant.vocab_size)
    with open_store(folder(name)) as store:
        expected = oracle.Session(store.variant, store).prefill(ids)
    found = model.session().prefill(ids, logits="all")
    far = np.min(ties, axis=0) > TIE
    assert far.sum() > 240
    assert min(cosine(a, b) for a, b in zip(found[far], expected[far], strict=True)) >= COSINE


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_is_prefill(folder: Folder, name: str) -> None:
    """A row of a chunk is evaluated as if it were alone: the same bits, in chunks of any size."""
    model = moeflux.load(folder(name), threads=2, chunk=7)
    ids = tokens(40, vocab=model.variant.vocab_size)
    session = model.session()
    stepped = np.stack([session.step(token).numpy() for token in ids])
    for chunk in (1, 7, 64):
        at_once = moeflux.load(folder(name), threads=2, chunk=chunk).session().prefill(ids, logits="all")
        assert np.array_equal(at_once, stepped)


def run(folder: Path, **settings: object) -> np.ndarray:
    """Logits of a prefill and some steps, under some settings."""
    session_settings = {key: settings.pop(key) for key in ("max_context", "kv_dtype") if key in settings}
    model = moeflux.load(folder, **settings)  # type: ignore[arg-type]
    session = model.session(**session_settings)  # type: ignore[arg-type]
    ids = tokens(20, vocab=model.variant.vocab_size)
    rows = [*session.prefill(ids, logits="all")]
    rows += [session.step(token).numpy() for token in tokens(12, vocab=model.variant.vocab_size, seed=5)]
    return np.stack(rows)


@pytest.mark.parametrize("name", NAMES)
def test_settings_change_no_bit(folder: Folder, name: str) -> None:
    """Threads, slots (down to the fewest), readers and ring depth are about speed alone."""
    base = run(folder(name), threads=1)
    fewest = moeflux.load(folder(name)).variant.experts.per_token
    for settings in (
        {"threads": 1},
        {"threads": 2},
        {"threads": 3},
        {"threads": 2, "ring_depth": 1},
        {"threads": 2, "ring_depth": 4, "expert_slots": fewest},
        {"threads": 1, "readers": 1, "expert_slots": fewest + 1},
        {"threads": 2, "readers": 3, "expert_slots": 2 * fewest},
        {"threads": 2, "max_context": 64},
    ):
        assert np.array_equal(run(folder(name), **settings), base), settings


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8"])
@pytest.mark.parametrize("name", NAMES)
def test_rounded_rows_stay_close(folder: Folder, name: str, kv_dtype: str) -> None:
    """Not within the oracle's tolerance: these random models are sharp, and a rounded key can change an expert."""
    base, narrow = (run(folder(name), kv_dtype=dtype, precision="exact") for dtype in ("f32", kv_dtype))
    assert not np.array_equal(base, narrow)
    cosines = [cosine(a, b) for a, b in zip(base, narrow, strict=True)]
    assert (min(cosines) if kv_dtype == "bf16" else np.median(cosines)) >= 0.99


@pytest.mark.parametrize("name", ("qwen3_next", "deepseek_v3"))
def test_a_stock_mlx_folder_gives_the_same_bits(folder: Folder, tmp_path: Path, name: str) -> None:
    write_mlx_folder(folder(name), tmp_path / "mlx")
    assert np.array_equal(run(tmp_path / "mlx"), run(folder(name)))


def test_every_isa_meets_the_oracle(folder: Folder) -> None:
    with open_store(folder("qwen3_5_moe")) as store:
        ids = tokens(24, vocab=store.variant.vocab_size)
        expected = oracle.Session(store.variant, store).prefill(ids)
    for isa in moeflux.available_isas():
        found = moeflux.load(folder("qwen3_5_moe"), isa=isa).session().prefill(ids, logits="all")
        assert min(cosine(a, b) for a, b in zip(found, expected, strict=True)) >= COSINE, isa


def test_experts_are_read_once_when_all_fit(folder: Folder) -> None:
    model = moeflux.load(folder("qwen3_5_moe"))
    session = model.session()
    ids = tokens(60, vocab=model.variant.vocab_size)
    session.prefill(ids)
    first = session.stats
    assert first.expert_misses > 0 and first.bytes_read > 0
    other = model.session()
    other.prefill(ids)
    assert (other.stats.expert_misses, other.stats.bytes_read) == (0, 0)
    # Each row's count where the host does not see the routers' choices.
    of_rows = len(ids) * len(model.variant.moe_layers) * model.variant.experts.per_token
    assert other.stats.expert_hits in (first.expert_hits + first.expert_misses, of_rows)


def test_a_step_waits_and_submits_little(folder: Folder) -> None:
    """Streaming: at most two submissions and one wait a layer, and one of each for the logits and the end."""
    model = moeflux.load(folder("qwen3_5_moe"), expert_slots=4)
    session = model.session()
    session.prefill(tokens(8, vocab=model.variant.vocab_size))
    session.step(3)
    layers = model.variant.num_layers
    assert session.stats.submissions <= 2 * layers + 2
    assert session.stats.waits <= layers + 2


@pytest.mark.parametrize("variant", [hybrid(num_experts=3), latent()], ids=lambda variant: variant.model_type)
def test_a_step_with_every_expert_in_memory_submits_once(tmp_path: Path, variant: moeflux.Variant) -> None:
    """Once each expert has been read, the host does not ask which the router picked. The bits are the same."""
    synth(tmp_path / "store", variant)
    ids = tokens(100, vocab=variant.vocab_size)
    streaming = moeflux.load(tmp_path / "store", threads=2, expert_slots=variant.experts.per_token).session()
    resident = moeflux.load(tmp_path / "store", threads=2).session()
    streaming.prefill(ids)
    resident.prefill(ids)
    for token in tokens(8, vocab=variant.vocab_size, seed=3):
        assert np.array_equal(resident.step(token).numpy(), streaming.step(token).numpy())
        assert (resident.stats.submissions, resident.stats.waits) == (1, 1)
        assert resident.stats.expert_hits == len(variant.moe_layers) * variant.experts.per_token


def test_logits_ways(folder: Folder) -> None:
    session = moeflux.load(folder("qwen3_moe")).session()
    logits = session.prefill([1, 2, 3])
    values = logits.numpy()
    assert logits.argmax() == values.argmax()
    ids, best = logits.top_k(5)
    order = np.argsort(-values, kind="stable")[:5]
    assert ids.tolist() == order.tolist() and best.tolist() == values[order].tolist()
    out = np.empty_like(values)
    assert logits.numpy(out) is not None and np.array_equal(out, values)
    assert np.array_equal(np.asarray(logits), values)
    session.step(4)
    with pytest.raises(moeflux.StateError, match="expected to be used before the session evaluates again"):
        logits.argmax()


def test_all_logits_into_given_memory(folder: Folder) -> None:
    model = moeflux.load(folder("qwen3_moe"))
    expected = model.session().prefill([1, 2, 3], logits="all")
    out = np.empty((3, model.variant.vocab_size), np.float32)
    assert np.array_equal(model.session().prefill([1, 2, 3], logits="all", out=out), expected)
    assert np.array_equal(out, expected)
    with pytest.raises(moeflux.ArgumentError, match="out: expected a writeable, contiguous float32 array"):
        model.session().prefill([1, 2, 3], logits="all", out=out.astype(np.float64))


def test_loading_tells_how_far_it_is_and_can_be_stopped(folder: Folder) -> None:
    seen: list[tuple[int, int]] = []
    told = {"backend": "cpu", "on_progress": lambda done, total: seen.append((done, total))}  # a GPU has less to read
    moeflux.load(folder("qwen3_moe"), threads=1, **told)
    with moeflux.open_store(folder("qwen3_moe")) as store:
        bytes_stored = sum(size for tensor in store.directory.tensors.values() for _, _, size in tensor.spans)
    assert seen == sorted(seen) and seen[-1] == (bytes_stored, bytes_stored)
    with pytest.raises(moeflux.StateError, match="load: stopped by its caller after"):
        moeflux.load(folder("qwen3_moe"), threads=1, on_progress=lambda done, total: False)

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moeflux.load(folder("qwen3_moe"), threads=1, on_progress=fail)
