"""The layer that drafts (multi-token prediction): what it says will follow, given what the head has read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeflux.oracle.model import Session, State, empty_mixer_state, layer
from moeflux.oracle.ops import embed, matmul, residual_add, rms_norm

Array = np.ndarray


def draft_logits(session: Session, hidden: Array, tokens: Sequence[int]) -> Array:
    """What the layer says will follow each of these tokens [n], given what the head has read of the one before each,
    `hidden` [n, h], and all pairs before it: logits [n, vocab]"""
    read, _ = _read(session, hidden, tokens, 0, _empty_state(session))
    return session.head(read)


def draft(session: Session, hidden: Array, ids: Sequence[int], token: int, count: int) -> tuple[list[int], Array]:
    """What it says will follow `token`, which follows the tokens `ids` [n], of which the head has read `hidden` [n, h]:
    `count` tokens, and the logits [count, vocab] that they are the likeliest of. It sees a guess of its own with what
    the head has read of the layer for it."""
    state = _empty_state(session)
    tokens, first = [*ids[1:], token], 0
    guesses: list[int] = []
    said = []
    for _ in range(count):
        read, state = _read(session, hidden, tokens, first, state)
        hidden = read[-1:]
        said.append(session.head(hidden)[0])
        first, tokens = first + len(tokens), [int(np.argmax(said[-1]))]
        guesses += tokens
    return guesses, np.stack(said)


def _empty_state(session: Session) -> State:
    assert session.variant.draft is not None
    return empty_mixer_state(session.variant.draft.mixer)


def _read(session: Session, hidden: Array, tokens: Sequence[int], first: int, state: State) -> tuple[Array, State]:
    """What the head reads of the layer [n, h], of which these are rows `first` and so on."""
    v, w, eps = session.variant, session.weights, session.variant.rms_norm_eps
    at = f"model.layers.{v.num_layers}."
    of_token = rms_norm(embed(w("model.embed_tokens"), tokens), w(f"{at}enorm.weight"), eps)
    of_hidden = rms_norm(hidden, w(f"{at}hnorm.weight"), eps)
    x = residual_add(matmul(of_token, w(f"{at}e_proj")), matmul(of_hidden, w(f"{at}h_proj")))
    positions = np.arange(first, first + len(tokens))
    x, state = layer(v, w, v.num_layers, x, positions, state, absorbed=session.absorbed)
    return rms_norm(x, w(f"{at}shared_head.norm.weight"), eps), state
