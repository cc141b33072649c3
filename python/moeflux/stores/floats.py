"""The float types of checkpoints that NumPy lacks: bf16 and fp8 (e4m3), as conversions from and to float32; and rows in
8 bits, as sessions keep them."""

from __future__ import annotations

import numpy as np

__all__ = [
    "E4M3",
    "FLOAT_BYTES",
    "bf16_bits",
    "decode",
    "decoded_rows",
    "encode",
    "is_float",
    "logarithms",
    "rounded",
    "row_codes",
]

LEAST_SCALE = np.float32(2.0**-100)
"""Heads of rows whose scale would be smaller count as zeros."""

FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}


def is_float(dtype: str) -> bool:
    return dtype in FLOAT_BYTES


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> the u16 pattern of the nearest bf16, ties to even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    upper = (bits >> 16) & 1
    upper += 0x7FFF
    upper += bits
    upper >>= 16
    result = upper.astype(np.uint16)
    if np.isnan(values).any():
        result[np.isnan(values)] = 0x7FC0
    return result


def row_codes(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [..., dim] -> int8 codes, and the u16 patterns of a bf16 scale for each head, as a session with such rows
    makes them (oracle.quantize_rows)."""
    largest = np.abs(heads).max(axis=-1, keepdims=True)  # NaN where there is one
    finite = np.isfinite(largest)
    scales = rounded(np.where(finite, largest, np.float32(0)) / np.float32(127), "BF16")
    coded = finite & (scales >= LEAST_SCALE)
    inverse = np.float32(1) / np.where(coded, scales, np.float32(1))
    codes = np.rint(np.where(coded, heads, np.float32(0)) * inverse).astype(np.int8)
    scales = np.where(coded, scales, np.where(finite, np.float32(0), np.float32(np.nan)))
    return codes, bf16_bits(scales[..., 0])


def decoded_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes and their scales -> float32, exactly."""
    wide = decode(np.ascontiguousarray(scales).reshape(-1).view(np.uint8), "BF16").reshape(scales.shape)
    numbers: np.ndarray = codes * wide[..., None]
    return numbers


def _e4m3_table() -> np.ndarray:
    """The 256 values of fp8 e4m3 "fn": no infinities, 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent = (code >> 3) & 15
    mantissa = (code & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


E4M3 = _e4m3_table()
"""What codes stand for."""


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Stored bytes (1-D uint8) -> float32, exactly."""
    if dtype == "F32":
        return raw.view("<f4").astype(np.float32, copy=False)
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    if dtype == "BF16":
        wide = raw.view("<u2").astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    numbers: np.ndarray = E4M3[raw]
    return numbers


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> stored bytes (1-D uint8), rounded to nearest even."""
    if dtype == "BF16":
        stored = bf16_bits(values)
    elif dtype == "F16":
        with np.errstate(over="ignore"):  # a value too large becomes infinite, which the caller refuses
            stored = values.astype("<f2")
    else:
        stored = np.ascontiguousarray(values, dtype="<f4")
    return stored.reshape(-1).view(np.uint8)


def logarithms(values: np.ndarray) -> np.ndarray:
    """float32 values that are -exp(x) -> x in float32."""
    return np.log(-values.astype(np.float64)).astype(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as `dtype` holds them, still in float32."""
    return values if dtype == "F32" else decode(encode(values, dtype), dtype).reshape(values.shape)
