"""The ops of several residual streams side by side, and of n-gram embeddings. A row of streams is [streams, width]."""

from __future__ import annotations

import math

import numpy as np

from moeflux.oracle.ops import Array, rms_norm, sigmoid
from moeflux.oracle.ops import silu as plain_silu


def silu(x: Array, factor: float = 1.0) -> Array:
    return plain_silu(x * factor)


def hyper_norm(x: Array, weight: Array, eps: float) -> Array:
    """Each stream by its own norm. x [n, streams, width], weight [streams, width]"""
    return rms_norm(x, weight, eps)


def hyper_mix(normed: Array, gates: Array) -> Array:
    """What a half of a layer reads: the mean of the gated streams. Both [n, streams, width] -> [n, width]"""
    return np.asarray((normed * sigmoid(gates)).mean(axis=1))


def hyper_add(x: Array, y: Array, gates: Array) -> Array:
    """What a half of a layer yields goes to each stream by a factor of 0 to 2, which is 1 for a gate of 0.
    x [n, streams, width], y [n, width], gates [n, streams] -> [n, streams, width]"""
    return np.asarray(x + y[:, None, :] * 2.0 * sigmoid(gates / gates.shape[1])[..., None])


def ngram_gate(key: Array, query: Array, value: Array) -> Array:
    """How much of a value each stream takes. key and query [n, streams, width], value [n, width]
    -> [n, streams, width]

    The score is the product of key and query. Its root keeps its sign and is at least a thousandth.
    """
    score = (key * query).sum(axis=-1, keepdims=True) / math.sqrt(key.shape[-1])
    root = np.sqrt(np.maximum(np.abs(score), 1e-6)) * np.sign(score)
    return np.asarray(sigmoid(root) * value[:, None, :])
