"""The numbers of tiny checkpoints, and the types in which checkpoints are published: bf16, fp8 with a scale a block,
int4 with a scale a group, MXFP4. NumPy only, and exact: the same bits on every machine."""

from __future__ import annotations

import hashlib

import numpy as np


def splitmix64(seed: int, count: int) -> np.ndarray:
    """`count` u64 of the splitmix64 sequence that starts at `seed`."""
    z = np.arange(1, count + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def name_seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def uniform(name: str, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    bits = splitmix64(name_seed(name), int(np.prod(shape))) >> np.uint64(32)
    return (low + (high - low) * (bits.astype(np.float64) / 2.0**32)).reshape(shape)


def normal(name: str, shape: tuple[int, ...], deviation: float) -> np.ndarray:
    """Nearly normal: a sum of eight 16-bit uniforms. No logarithm, no cosine: their last bit depends on the machine."""
    parts = splitmix64(name_seed(name), 2 * int(np.prod(shape))).view(np.uint16).reshape(-1, 8)
    sums = parts.astype(np.float32) @ np.ones(8, np.float32)  # exact, for they are below 2^24
    centred = sums.astype(np.float64) - 8 * 32768 + 4
    return (centred * (deviation / (65536 * np.sqrt(8 / 12)))).reshape(shape)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Nearest bf16, ties to even, as its u16 bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp8_values() -> np.ndarray:
    """Value of every e4m3 code without its sign, 0 ... 126 (127 is not a number): ascending."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, (code & 7).astype(np.float64)
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def to_fp8(values: np.ndarray) -> np.ndarray:
    """Nearest e4m3 code, ties to the even code, saturating at 448."""
    table = fp8_values()
    size = np.minimum(np.abs(values), table[-1])
    upper = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    below, above = size - table[upper - 1], table[upper] - size
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return (np.where(take_upper, upper, upper - 1) | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def fp8_blocks(values: np.ndarray, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as e4m3 codes and one f32 `scale_inv` a block; the blocks at the right and lower edge may be partial."""
    rows, columns = values.shape
    codes = np.empty(values.shape, np.uint8)
    scales = np.empty((-(-rows // block), -(-columns // block)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scales[i, j] = np.float32(np.abs(values[part]).max() / 448.0)
            codes[part] = to_fp8(values[part] / np.float64(scales[i, j]))
    return codes, scales


def int4_groups(values: np.ndarray, group: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as codes of 4 bits, eight to a word and 8 more than what they stand for, and the bits of one bf16 scale
    a group: as compressed-tensors packs them."""
    groups = values.reshape(len(values), -1, group)
    scales = to_bf16(np.abs(groups).max(axis=-1) / 7.5)
    codes = np.clip(np.rint(groups / from_bf16(scales)[..., None].astype(np.float64)), -8, 7).astype(np.int64) + 8
    words = (codes.reshape(len(values), -1, 8) << (4 * np.arange(8))).sum(axis=-1)
    return words.astype(np.uint32).view(np.int32), scales


def from_int4(words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    codes = (words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
    groups = codes.reshape(*scales.shape, -1).astype(np.float32) - np.float32(8)
    return (groups * from_bf16(scales)[..., None]).reshape(len(words), -1)


MXFP4_SIZES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_blocks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [..., columns] as codes, two to a byte and the lower first [..., columns / 32, 16], and the exponent of the
    power of two that 32 numbers share [..., columns / 32]: as gpt_oss publishes its experts."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    _, exponents = np.frexp(np.abs(blocks).max(axis=-1))
    exponents = exponents - 3  # the largest number is 4 to 8 of them, and 6 is as far as codes go
    sizes = np.abs(blocks) / np.ldexp(1.0, exponents)[..., None]
    codes = np.searchsorted((MXFP4_SIZES[1:] + MXFP4_SIZES[:-1]) / 2, sizes) | np.where(np.signbit(blocks), 8, 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8), (exponents + 127).astype(np.uint8)


def from_mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    both = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, 32)
    numbers = np.where(both & 8, -1.0, 1.0) * MXFP4_SIZES[both & 7] * np.ldexp(1.0, scales.astype(int) - 127)[..., None]
    return numbers.reshape(*scales.shape[:-1], -1).astype(np.float32)
