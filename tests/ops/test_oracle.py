"""The oracle's ops against the same ops written out in scalars, against worked figures, and against their laws."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from golden.checkpoints import token_ids
from golden.elements import normal, uniform
from moeflux import QuantFormat, oracle
from support import reference_weights

QUANTIZE_GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "quantize.npz"


def some(*shape: int, name: str = "x") -> np.ndarray:
    return normal(f"test_oracle/{name}", shape, 1.0)


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return np.shape(found) == np.shape(expected) and np.allclose(found, expected, rtol=1e-12, atol=1e-12)


# ---- Stored numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_run_on_over_word_ends(bits: int) -> None:
    codes = uniform(f"codes{bits}", (3, 64), 0, 1 << bits).astype(np.int64)
    words = oracle.pack_codes(codes, bits)
    assert words.shape == (3, 2 * bits) and words.dtype == np.uint32
    for row in range(3):
        whole = sum(int(code) << (bits * i) for i, code in enumerate(codes[row]))
        assert [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(2 * bits)] == words[row].tolist()
    assert np.array_equal(oracle.unpack_codes(words, bits), codes)


def test_dequantize_by_hand() -> None:
    """4 bits: columns 0-7 in the first word, low nibble first; one scale, here negative, and one bias a group."""
    words = np.zeros((1, 8), np.uint32)
    words[0, 0], words[0, 4] = 0x8000_0021, 0x0000_000F
    stored = reference_weights.Plain(
        words, QuantFormat.affine(4, 32), np.array([[0x3F00, 0xC000]], np.uint16), np.array([[0, 0x3F80]], np.uint16)
    )
    found = oracle.widen(stored)  # scales 0.5 and -2, biases 0 and 1
    assert found.shape == (1, 64)
    assert found[0, [0, 1, 2, 7, 31]].tolist() == [0.5, 1.0, 0.0, 4.0, 0.0]
    assert found[0, [32, 33, 63]].tolist() == [-29.0, 1.0, 1.0]


@pytest.mark.parametrize(("element", "raw"), [("BF16", 0x3FC0), ("F16", 0x3E00)])
def test_plain_types_are_exact(element: str, raw: int) -> None:
    stored = reference_weights.Plain(np.array([raw], np.uint16), QuantFormat.plain(element))
    assert oracle.widen(stored).tolist() == [1.5]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantize_is_mlx(bits: int, group: int) -> None:
    """From bf16, whose scales MLX rounds to bf16, and from f32."""
    with np.load(QUANTIZE_GOLDEN) as golden:
        for element in ("BF16", "F32"):
            raw = golden[f"{element}/input"]
            values = oracle.bf16_to_float(raw) if element == "BF16" else raw
            words, scales, biases = oracle.quantize(values, bits, group)
            if element == "BF16":
                scales, biases = oracle.float_to_bf16(scales), oracle.float_to_bf16(biases)
            for part, found in (("words", words), ("scales", scales), ("biases", biases)):
                expected = golden[f"{element}/{bits}/{group}/{part}"]
                assert np.array_equal(found, expected), f"{element} {part}"


# ---- Norms and small functions ----------------------------------------------------------------------------------


def test_norms() -> None:
    x, z, weight = some(2, 3, 8), some(2, 3, 8, name="z"), some(8, name="w")
    normed, gated = oracle.rms_norm_heads(x, weight, 0.01), oracle.gated_rms_norm(x, z, weight, 0.01)
    for n in range(2):
        for head in range(3):
            size = math.sqrt(sum(value**2 for value in x[n, head]) / 8 + 0.01)
            for i in range(8):
                expected = x[n, head, i] / size * weight[i]
                assert normed[n, head, i] == pytest.approx(expected)
                assert gated[n, head, i] == pytest.approx(expected * z[n, head, i] / (1 + math.exp(-z[n, head, i])))
    assert close(oracle.rms_norm(x, None, 0.0), oracle.rms_norm(1000 * x, np.ones(8), 0.0))


def test_large_arguments_do_not_overflow() -> None:
    """Warnings are errors here."""
    huge = np.array([[-1e4, -800.0, 0.0, 800.0, 1e4]])
    decay, beta = oracle.delta_net_gates(huge, huge, np.zeros(5), np.zeros(5))
    assert decay[0].tolist() == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])
    assert beta[0].tolist() == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.0])
    assert oracle.swiglu(huge, np.ones(5))[0].tolist() == pytest.approx([0.0, 0.0, 0.0, 800.0, 1e4])
    ids, weights = oracle.route_softmax(huge, 2, normalize=True)
    assert ids.tolist() == [[4, 3]] and weights.tolist() == [[1.0, 0.0]]


def test_matvec_is_a_row_of_matmul() -> None:
    x, matrix = some(3, 8), some(5, 8, name="m")
    assert close(oracle.matmul(x, matrix)[1], oracle.matvec(x[1], matrix))
    assert oracle.matvec(x[1], matrix)[4] == pytest.approx(sum(matrix[4, i] * x[1, i] for i in range(8)))


def test_bias_add() -> None:
    rows = oracle.bias_add(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([10.0, 20.0]))
    assert rows.tolist() == [[11.0, 22.0], [13.0, 24.0]]


def test_sigmoid_gate() -> None:
    assert oracle.sigmoid_gate(np.array([4.0, 4.0]), np.array([0.0, math.log(3)])) == pytest.approx([2.0, 3.0])


def test_embed_refuses_other_ids() -> None:
    table = some(5, 3)
    assert np.array_equal(oracle.embed(table, [4, 0]), table[[4, 0]])
    for token in (-1, 5):
        with pytest.raises(ValueError, match=f"token id: expected 0 to 4, found {token}"):
            oracle.embed(table, [0, token])


# ---- Rotary embedding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_by_hand(interleaved: bool) -> None:
    x, frequencies = some(2, 3, 12), oracle.vanilla_frequencies(8, 100.0)
    assert frequencies == pytest.approx([1.0, 100**-0.25, 0.1, 100**-0.75])
    found = oracle.rope(x, np.array([3, 70]), frequencies, interleaved=interleaved, magnitude=2.0)
    for n, position in enumerate((3, 70)):
        for i, frequency in enumerate(frequencies):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
            a, b = x[n, 1, first], x[n, 1, second]
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            assert found[n, 1, first] == pytest.approx(2 * (a * cos - b * sin))
            assert found[n, 1, second] == pytest.approx(2 * (a * sin + b * cos))
    assert np.array_equal(found[..., 8:], x[..., 8:])


def test_yarn_keeps_the_fast_and_slows_the_rest() -> None:
    plain = oracle.vanilla_frequencies(64, 1e4)
    yarn = oracle.yarn_frequencies(64, 1e4, 40.0, 4096, 32.0, 1.0)
    assert close(yarn[:11], plain[:11]) and close(yarn[23:], plain[23:] / 40)
    between = plain[11:23] / yarn[11:23]
    assert (np.diff(between) > 0).all() and between[0] > 1 and between[-1] < 40
    # Bounds that fall together make a step, not a division by nothing.
    step = oracle.yarn_frequencies(64, 1e4, 40.0, 4096, 32.0, 32.0)
    assert np.isfinite(step).all()


# ---- Attention --------------------------------------------------------------------------------------------------


def test_attention_in_scalars() -> None:
    """Two new rows behind three cached ones; heads 0 and 1 share key head 0, heads 2 and 3 key head 1."""
    q, k, v = some(2, 4, 6), some(5, 2, 6, name="k"), some(5, 2, 6, name="v")
    found = oracle.attention(q, k, v, 0.3)
    for row in range(2):
        for head in range(4):
            seen = range(3 + row + 1)
            weights = [math.exp(0.3 * float(q[row, head] @ k[p, head // 2])) for p in seen]
            expected = sum(weight * v[p, head // 2] for p, weight in zip(seen, weights, strict=True)) / sum(weights)
            assert close(found[row, head], expected)


def test_two_forms_of_latent_attention() -> None:
    q_nope, q_pe = some(3, 4, 6), some(3, 4, 2, name="qp")
    latent, k_pe = some(7, 5, name="l"), some(7, 2, name="kp")
    keys, values = some(4, 6, 5, name="wk"), some(4, 8, 5, name="wv")
    naive, absorbed = (
        oracle.mla_attention(q_nope, q_pe, latent, k_pe, keys, values, 0.4, absorbed=form) for form in (False, True)
    )
    assert naive.shape == (3, 4, 8)
    assert close(naive, absorbed)
    # Both are ordinary attention over keys and values made from the latent, each head with its own.
    for head in range(4):
        k = np.concatenate([latent @ keys[head].T, k_pe], axis=1)[:, None]
        q = np.concatenate([q_nope, q_pe], axis=2)[:, head : head + 1]
        assert close(naive[:, head : head + 1], oracle.attention(q, k, (latent @ values[head].T)[:, None], 0.4))


# ---- Gated delta-net --------------------------------------------------------------------------------------------


def test_conv1d_in_scalars() -> None:
    x, state, weight = some(5, 3), some(3, 3, name="s"), some(3, 4, name="w")
    found, after = oracle.conv1d(x, state, weight)
    rows = [*state, *x]
    for n in range(5):
        for channel in range(3):
            y = sum(weight[channel, tap] * rows[n + tap][channel] for tap in range(4))
            assert found[n, channel] == pytest.approx(y / (1 + math.exp(-y)))
    assert np.array_equal(after, x[-3:])


def test_conv1d_in_pieces() -> None:
    x, state, weight = some(5, 3), some(3, 3, name="s"), some(3, 4, name="w")
    whole, whole_state = oracle.conv1d(x, state, weight)
    first, middle_state = oracle.conv1d(x[:1], state, weight)
    second, last_state = oracle.conv1d(x[1:], middle_state, weight)
    assert close(np.concatenate([first, second]), whole) and np.array_equal(last_state, whole_state)


def test_delta_net_query_and_key_lengths() -> None:
    q, k = oracle.delta_net_query_key(100 * some(2, 3, 16), 100 * some(2, 3, 16, name="k"))
    assert np.linalg.norm(q, axis=-1) == pytest.approx(np.full((2, 3), 1 / 4))
    assert np.linalg.norm(k, axis=-1) == pytest.approx(np.ones((2, 3)))
    # 1e-6 is added to the sum of squares: a vector of length 1e-3 comes out at 1 / sqrt(2).
    _, short = oracle.delta_net_query_key(q, 1e-3 * k)
    assert np.linalg.norm(short, axis=-1) == pytest.approx(np.full((2, 3), math.sqrt(0.5)))


@pytest.mark.parametrize("tiled", [False, True])
def test_gated_delta_in_scalars(tiled: bool) -> None:
    q, k, v = some(3, 2, 4), some(3, 2, 4, name="k"), some(3, 6, 5, name="v")
    decay, beta = uniform("decay", (3, 6), 0.2, 1.0), uniform("beta", (3, 6), 0.0, 1.0)
    state = some(6, 5, 4, name="state")
    found, after = oracle.gated_delta(q, k, v, decay, beta, state, tiled=tiled)
    for head in range(6):
        s = state[head].copy()
        shared = head % 2 if tiled else head // 3
        for n in range(3):
            key, query = k[n, shared], q[n, shared]
            for a in range(5):
                row = [decay[n, head] * s[a, c] for c in range(4)]
                held = sum(row[c] * key[c] for c in range(4))
                correction = (v[n, head, a] - held) * beta[n, head]
                s[a] = [row[c] + key[c] * correction for c in range(4)]
                assert found[n, head, a] == pytest.approx(sum(s[a, c] * query[c] for c in range(4)))
        assert close(after[head], s)


def test_gated_delta_remembers() -> None:
    """What is written at a key of length 1 with beta 1 is read there, and writing again replaces it."""
    k = np.eye(4)[[0, 1, 0, 0]][:, None]
    v = some(4, 1, 5)
    one = np.ones((4, 1))
    q = np.eye(4)[[0, 0, 1, 0]][:, None]
    out, _ = oracle.gated_delta(q, k, v, one, one, np.zeros((1, 5, 4)))
    assert close(out[:, 0], v[[0, 0, 1, 3], 0])


# ---- Experts ----------------------------------------------------------------------------------------------------


def test_route_softmax() -> None:
    logits = np.log(np.array([[1.0, 4.0, 2.0, 1.0], [2.0, 2.0, 2.0, 2.0]]))
    ids, weights = oracle.route_softmax(logits, 2, normalize=False)
    assert ids.tolist() == [[1, 2], [0, 1]]  # the earlier expert wins a tie
    assert weights == pytest.approx(np.array([[0.5, 0.25], [0.25, 0.25]]))
    ids, weights = oracle.route_softmax(logits, 2, normalize=True)
    assert weights == pytest.approx(np.array([[2 / 3, 1 / 3], [0.5, 0.5]]))


def test_route_grouped_worked_example() -> None:
    logits = np.array([[3.0, -2.0, 1.0, -1.0, -3.0, 2.0, 0.0, 4.0]])
    bias = np.array([0.1, 0.2, -0.3, 0.0, 0.0, 0.4, -0.1, 0.05])
    ids, weights = oracle.route_grouped(logits, bias, 2, groups=2, groups_kept=1, normalize=True, scaling=2.5)
    assert ids.tolist() == [[5, 7]]
    scores = np.array([0.88079708, 0.98201379])
    assert weights[0] == pytest.approx(2.5 * scores / scores.sum(), rel=1e-7)
    _, weights = oracle.route_grouped(logits, bias, 2, groups=2, groups_kept=1, normalize=False, scaling=2.5)
    assert weights[0] == pytest.approx(2.5 * scores, rel=1e-7)


def test_route_grouped_never_leaves_the_kept_groups() -> None:
    """Not even when every biased score there is below zero."""
    logits, bias = some(1, 8), np.array([-3.0] * 4 + [-9.0] * 4)
    ids, _ = oracle.route_grouped(logits, bias, 3, groups=2, groups_kept=1, normalize=True, scaling=1.0)
    assert (ids < 4).all()


def test_route_grouped_bias_is_for_choosing() -> None:
    logits = np.zeros((1, 4))
    ids, weights = oracle.route_grouped(
        logits, np.array([0.0, 0.3, 0.1, 0.2]), 2, groups=1, groups_kept=1, normalize=True, scaling=1.0
    )
    assert ids.tolist() == [[1, 3]] and weights.tolist() == [[0.5, 0.5]]


def test_expert_ffn_and_combine() -> None:
    x, gate, up, down = some(2, 4), some(6, 4, name="g"), some(6, 4, name="u"), some(4, 6, name="d")
    outputs = np.stack([oracle.expert_ffn(x, gate, up, down), some(2, 4, name="other")], axis=1)
    a = gate @ x[1]
    assert close(outputs[1, 0], down @ (a / (1 + np.exp(-a)) * (up @ x[1])))
    weights, residual, shared = some(2, 2, name="weights"), some(2, 4, name="r"), some(2, 4, name="shared")
    expected = residual[1] + weights[1, 0] * outputs[1, 0] + weights[1, 1] * outputs[1, 1]
    assert close(oracle.combine(residual, outputs, weights, None)[1], expected)
    assert close(oracle.combine(residual, outputs, weights, shared)[1], expected + shared[1])


# ---- Sessions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "qwen3_moe_tied", "deepseek_v3", "kimi_plain_q"])
def test_one_pass_pieces_and_steps(name: str) -> None:
    """The state is all that a session needs to know of the past."""
    variant, weights = reference_weights.load(name)
    ids = token_ids(name)[:24]
    session = oracle.Session(variant, weights)
    whole = session.prefill(ids)
    assert session.position == 24 and whole.shape == (24, variant.vocab_size)
    session.clear()
    pieces = np.concatenate([session.prefill(ids[:1]), session.prefill(ids[1:9]), session.prefill(ids[9:24])])
    session.clear()
    steps = np.stack([session.step(token) for token in ids])
    assert session.position == 24
    for found in (pieces, steps):
        assert np.allclose(found, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi", "kimi_plain_q"])
def test_sessions_of_both_latent_forms(name: str) -> None:
    variant, weights = reference_weights.load(name)
    ids = token_ids(name)
    naive, absorbed = (oracle.Session(variant, weights, absorbed=form).prefill(ids) for form in (False, True))
    assert np.allclose(naive, absorbed, rtol=1e-9, atol=1e-9)


def test_a_failed_call_changes_nothing() -> None:
    variant, weights = reference_weights.load("qwen3_5_moe")
    ids = token_ids("qwen3_5_moe")[:6]
    session = oracle.Session(variant, weights)
    expected = session.prefill(ids)[5]
    session.clear()
    session.prefill(ids[:5])
    with pytest.raises(ValueError, match="token id"):
        session.prefill([1, variant.vocab_size])
    with pytest.raises(ValueError, match=f"position: expected at most {variant.max_context}"):
        session.prefill([1] * variant.max_context)
    assert session.position == 5
    assert np.allclose(session.step(ids[5]), expected, rtol=1e-9, atol=1e-9)


def test_a_failed_read_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert of the last layer cannot be read when the layers before it have already run."""
    variant, weights = reference_weights.load("qwen3_5_moe")
    ids = token_ids("qwen3_5_moe")[:6]
    session = oracle.Session(variant, weights, remember=False)
    expected = session.prefill(ids)[5]
    session.clear()
    session.prefill(ids[:5])

    def failing(layer: int, expert: int) -> tuple[reference_weights.Plain, ...]:
        if layer == 3:
            raise OSError("unreadable")
        return reference_weights.ReferenceWeights.expert(weights, layer, expert)

    with monkeypatch.context() as patch:
        patch.setattr(weights, "expert", failing)
        with pytest.raises(OSError, match="unreadable"):
            session.step(ids[5])
    assert session.position == 5
    assert np.allclose(session.step(ids[5]), expected, rtol=1e-9, atol=1e-9)


def test_nothing_remembered_is_the_same() -> None:
    variant, weights = reference_weights.load("qwen3_5_moe")
    remembering, forgetful = (oracle.Session(variant, weights, remember=keep) for keep in (True, False))
    ids = token_ids("qwen3_5_moe")[:4]
    assert np.array_equal(remembering.prefill(ids), forgetful.prefill(ids))
    assert remembering.weights.kept and not forgetful.weights.kept
