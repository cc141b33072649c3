"""Decides whether two sets of logits are the same answer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from golden.checkpoints import CHECKPOINTS
from moeflux.stores.storage import ConvertFormat

# What a float32 implementation may be off by, of the range of the logits. The peers' own float32 costs 3e-6.
LARGEST_ERROR = 1e-5
LEAST_COSINE = 0.99999

GOLDEN_LOGITS = Path(__file__).resolve().parents[1] / "golden" / "logits.npz"


def disagreement(found: np.ndarray, expected: np.ndarray) -> str:
    """What is wrong with `found` [positions, vocab]; empty when nothing is."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if found.shape != expected.shape:
        return f"shape: expected {expected.shape}, found {found.shape}"
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    cosine = ((found * expected).sum(axis=-1) / lengths).min()
    if not cosine >= LEAST_COSINE:
        return f"cosine: expected at least {LEAST_COSINE}, found {cosine:.8f}"
    error = np.abs(found - expected).max() / np.ptp(expected)
    if not error <= LARGEST_ERROR:
        return f"largest error: expected at most {LARGEST_ERROR} of the range, found {error:.2e}"
    others = np.flatnonzero(found.argmax(axis=-1) != expected.argmax(axis=-1))
    if len(others):
        return f"argmax: another token at positions {others.tolist()}"
    return ""


def golden_logits(name: str) -> np.ndarray:
    with np.load(GOLDEN_LOGITS) as golden:
        return golden[name]


@cache
def config_of(name: str) -> dict[str, Any]:
    """Of a checkpoint, which has its weights made, too."""
    return CHECKPOINTS[name]().config


def mlx_type(name: str, bits: int = 4, group: int = 64) -> ConvertFormat:
    """As mlx_lm.convert makes it of a checkpoint, in which experts of MXFP4 stay as they are."""
    default = ConvertFormat.default(config_of(name))
    experts = "mxfp4" if default.experts.is_mxfp4 else bits
    return ConvertFormat.asked(experts, group, dense_bits=bits, element=default.element)


def own_type(name: str) -> ConvertFormat:
    """That of a checkpoint: nothing is quantised but what is already."""
    element = ConvertFormat.default(config_of(name)).element
    if name in ("gpt_oss", "gpt_oss_whole_pairs"):
        return ConvertFormat.asked("mxfp4", element=element)
    if name == "kimi_k25":
        return ConvertFormat.asked(4, 32, dense_bits=element, element=element)
    return ConvertFormat.asked(element)
