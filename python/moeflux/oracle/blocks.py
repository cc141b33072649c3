"""The numbers of GGUF's types of blocks, in float32 as they are defined: only where a type has minima is anything
rounded. `docs/formats.md` says what lies where.

A function takes blocks uint8 [n, bytes] and returns float32 [n, columns].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""What a code of IQ4_NL and IQ4_XS stands for."""

TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice what a code of MXFP4 stands for. There is one zero."""


def block_numbers(rows: Array, name: str) -> Array:
    """Rows of whole blocks uint8 [..., bytes] of the type of that name -> float32 [..., columns]."""
    size, numbers = TYPES[name]
    blocks = np.ascontiguousarray(rows).reshape(-1, size)
    return numbers(blocks).reshape(*rows.shape[:-1], -1)


def _halves(blocks: Array, first: int, count: int = 1) -> tuple[Array, ...]:
    """Columns of f16 numbers from byte `first` on."""
    parts = np.ascontiguousarray(blocks[:, first : first + 2 * count]).view("<f2").astype(np.float32)
    return tuple(parts[:, i : i + 1] for i in range(count))


def _nibbles(codes: Array) -> Array:
    """The lower 4 bits of all bytes, then the upper ones."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _fields(codes: Array, bits: int) -> Array:
    """uint8 [n, spans, bytes]: of each span, the lowest `bits` of all bytes, then the next -> [n, columns]"""
    parts = [codes >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, axis=2).reshape(len(codes), -1)


def _scaled(codes: Array, scale: Array) -> Array:
    """Codes [n, columns] times the scale [n, groups] of their group."""
    groups = codes.astype(np.float32).reshape(*scale.shape, -1)
    return np.asarray(groups * scale[..., None])


def _numbers(codes: Array, scale: Array, least: Array | None = None) -> Array:
    scaled = _scaled(codes, scale)
    return (scaled if least is None else scaled - least[..., None]).reshape(codes.shape)


def _fifth(codes: Array, bits: Array) -> Array:
    """Codes of 4 bits [n, 32] with a fifth one from uint8 [n, 4]."""
    return np.asarray(codes | np.unpackbits(bits, axis=1, bitorder="little") << 4)


def q8_0(blocks: Array) -> Array:
    return _numbers(blocks[:, 2:].view(np.int8), *_halves(blocks, 0))


def q4_0(blocks: Array) -> Array:
    return _numbers(_nibbles(blocks[:, 2:]).astype(np.int8) - 8, *_halves(blocks, 0))


def q4_1(blocks: Array) -> Array:
    scale, bias = _halves(blocks, 0, 2)
    return _numbers(_nibbles(blocks[:, 4:]), scale, -bias)


def q5_0(blocks: Array) -> Array:
    codes = _fifth(_nibbles(blocks[:, 6:]), blocks[:, 2:6])
    return _numbers(codes.astype(np.int8) - 16, *_halves(blocks, 0))


def q5_1(blocks: Array) -> Array:
    scale, bias = _halves(blocks, 0, 2)
    return _numbers(_fifth(_nibbles(blocks[:, 8:]), blocks[:, 4:8]), scale, -bias)


def q2_k(blocks: Array) -> Array:
    scale, least = _halves(blocks, 80, 2)
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2)
    return _numbers(codes, scale * (blocks[:, :16] & 15), least * (blocks[:, :16] >> 4))


def q3_k(blocks: Array) -> Array:
    low, high = _fields(blocks[:, None, 96:104], 4), _fields(blocks[:, None, 104:108], 2)
    scales = (low | high << 4).astype(np.int8) - 32
    codes = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2) | _fields(blocks[:, None, :32], 1) << 2
    return _numbers(codes.astype(np.int8) - 4, _halves(blocks, 108)[0] * scales)


def _of_6_bits(blocks: Array) -> tuple[Array, Array]:
    """Scales and minima of Q4_K and Q5_K, eight of each."""
    scale, least = _halves(blocks, 0, 2)
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scale * scales, least * minima


def q4_k(blocks: Array) -> Array:
    return _numbers(_fields(blocks[:, 16:].reshape(-1, 4, 32), 4), *_of_6_bits(blocks))


def q5_k(blocks: Array) -> Array:
    codes = _fields(blocks[:, 48:].reshape(-1, 4, 32), 4) | _fields(blocks[:, None, 16:48], 1) << 4
    return _numbers(codes, *_of_6_bits(blocks))


def q6_k(blocks: Array) -> Array:
    codes = _fields(blocks[:, :128].reshape(-1, 2, 64), 4) | _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2) << 4
    return _numbers(codes.astype(np.int8) - 32, _halves(blocks, 208)[0] * blocks[:, 192:208].view(np.int8))


def iq4_nl(blocks: Array) -> Array:
    return _numbers(IQ4[_nibbles(blocks[:, 2:])], *_halves(blocks, 0))


def iq4_xs(blocks: Array) -> Array:
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2) & 3
    scales = (low | high << 4).astype(np.int8) - 32
    return _numbers(IQ4[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))].reshape(-1, 256), _halves(blocks, 0)[0] * scales)


def mxfp4(blocks: Array) -> Array:
    """The scale is the exponent of a power of two, 255 one like others. float32 holds half of each."""
    half = np.ldexp(np.float32(0.5), blocks[:, :1].astype(np.int32) - 127)
    return _numbers(TWICE_E2M1[_nibbles(blocks[:, 1:])], half)


TYPES: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "Q8_0": (34, q8_0),
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "Q5_0": (22, q5_0),
    "Q5_1": (24, q5_1),
    "Q2_K": (84, q2_k),
    "Q3_K": (110, q3_k),
    "Q4_K": (144, q4_k),
    "Q5_K": (176, q5_k),
    "Q6_K": (210, q6_k),
    "IQ4_NL": (18, iq4_nl),
    "IQ4_XS": (136, iq4_xs),
    "GGUF_MXFP4": (17, mxfp4),
}
"""Bytes of a block, and what it stands for."""
