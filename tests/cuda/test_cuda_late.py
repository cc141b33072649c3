"""What chips of compute capability 9.0 have besides, on the emulated GPU: copies in bulk, products of warpgroups,
clusters. Kernels that use them rightly compute what they should, and each mistake is found."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import numpy as np
import pytest

from emulator.build import library
from emulator.device import ORDERS, Fault, Library
from support.metal import needs_device

SAMPLE = Path(__file__).resolve().parents[1] / "emulator" / "samples" / "late.cuh"
THREADS = {"copied": 64, "all_copied": 64, "multiplied": 128, "exchanged": 64}

pytestmark = [needs_device, pytest.mark.usefixtures("only_emulated")]


class Params(ctypes.Structure):
    _fields_ = [("source", ctypes.c_void_p), ("to", ctypes.c_void_p), ("mistake", ctypes.c_uint64)]


@functools.cache
def sample(checked: bool) -> Library:
    return Library(library(SAMPLE, checked), checked)


@functools.cache
def mistakes() -> list[str]:
    listed = re.search(r"enum Mistake : u32 \{(.*?)\}", SAMPLE.read_text(), re.DOTALL)
    assert listed
    return re.findall(r"^ +(\w+),", listed.group(1), re.MULTILINE)


def given(kernel: str) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel reads, and room for what it writes."""
    rng = np.random.default_rng(1)
    if kernel == "multiplied":
        return rng.integers(0, 256, 64 * 32 + 32 * 32, np.uint8), np.zeros((2, 64, 32), np.int32)
    return np.arange(256, dtype=np.uint32), np.arange(128, dtype=np.uint32)


def expected(kernel: str) -> np.ndarray:
    source, to = given(kernel)
    if kernel == "copied":
        return np.concatenate([(source[:64] + source[64:128])[::-1] + 1, to[64:]])
    if kernel == "all_copied":
        return np.concatenate([source.reshape(64, 4).sum(axis=1, dtype=np.uint32)[::-1], to[64:]])
    if kernel == "exchanged":
        return np.concatenate([to[64:][::-1], to[:64][::-1]])
    a, b = source[: 64 * 32].reshape(64, 32).astype(np.int32), source[64 * 32 :].view(np.int8).reshape(32, 32)
    return np.stack([a @ b.T, 2 * (a @ b.T)])


def run(kernel: str, mistake: str, checked: bool, order: int, changes: bool = False) -> np.ndarray:
    """`changes`: the kernel before writes what this one reads."""
    source, to = given(kernel)
    params = Params(source.ctypes.data, to.ctypes.data, mistakes().index(mistake))
    blocks = 2 if kernel == "exchanged" else 1
    before = functools.partial(source.fill, 9) if changes else None
    sample(checked).launch(kernel, params, [source, to], blocks, THREADS[kernel], order=order, before=before)
    return to


FINE = [*((kernel, "none") for kernel in THREADS), ("copied", "asked_early"), ("copied", "awaited_by_one")]

FOUND = {
    ("copied", "not_awaited"): "read of shared, byte .*, while a copy to it is under way",
    ("copied", "awaited_by_one_alone"): "which was copied, and the thread has not awaited it|uninitialised",
    ("copied", "copied_over"): "data race on shared.*: write .* a read|never comes: expected 0|has not awaited",
    ("copied", "used_again"): "used again, and nobody has awaited",
    ("copied", "left_behind"): "ends before what nobody has awaited: expected 256 bytes, 256 were copied",
    ("copied", "too_few_bytes"): "an arrival that never comes: expected 240 bytes, 256 were copied, 1 of 1 threads",
    ("copied", "too_few_threads"): "an arrival that never comes: expected 256 bytes, 256 were copied, 1 of 2 threads",
    ("copied", "too_many_threads"): "used again, and nobody has awaited",
    ("copied", "not_aligned"): "a copy in bulk that is not of sixteen bytes each: 256 from byte 4 to byte 0",
    ("copied", "never_made"): "an arrival that nobody has made",
    ("copied", "made_without_a_barrier"): "another thread has made, and no barrier|that nobody has made",
    ("copied", "stored_behind"): "data race on shared, byte 256",
    ("copied", "read_as_memory"): "read of shared, byte 264, which is an arrival",
    ("copied", "outside"): "write of shared, byte 264, which is an arrival",
    ("all_copied", "not_awaited"): "read of shared, byte .*, while a copy to it is under way|uninitialised threadgroup",
    ("multiplied", "not_begun"): "a product that begin_products does not precede",
    ("multiplied", "not_shown"): "a product reads what was written and not shown: b, byte",
    ("multiplied", "overwritten"): "data race on b",
    ("multiplied", "never_read"): "products that nobody waited for",
    ("exchanged", "no_cluster"): "data race on memory",
    ("exchanged", "kept_too_early"): "data race on memory",
    ("exchanged", "never_arrived"): "waits for a cluster of whose threads some do not arrive",
    ("exchanged", "not_arrived_itself"): "waits for its cluster without having arrived",
}

# What the checker does not see. The result is wrong then, however threads go.
WRONG = [("multiplied", "overwritten_behind_a_barrier"), ("multiplied", "not_read_in_time")]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("kernel", "way"), FINE)
def test_what_is_right_is_not_blamed(kernel: str, way: str, checked: bool) -> None:
    for order in ORDERS:
        assert np.array_equal(run(kernel, way, checked, order), expected(kernel))


@pytest.mark.parametrize(("kernel", "mistake"), FOUND)
def test_mistakes_are_found(kernel: str, mistake: str) -> None:
    for order in ORDERS:
        with pytest.raises(Fault, match=FOUND[kernel, mistake]):
            run(kernel, mistake, True, order)


@pytest.mark.parametrize(("kernel", "mistake"), WRONG)
def test_products_are_made_when_they_are_awaited(kernel: str, mistake: str) -> None:
    for order in ORDERS:
        assert not np.array_equal(run(kernel, mistake, False, order), expected(kernel))


def test_every_mistake_is_in_a_list() -> None:
    assert {way for _, way in [*FINE, *FOUND, *WRONG]} == set(mistakes())


def test_a_wait_for_what_never_comes_ends_without_the_checker() -> None:
    for mistake in ("too_few_bytes", "too_few_threads"):
        with pytest.raises(Fault, match="an arrival that never comes"):
            run("copied", mistake, False, 0)
    with pytest.raises(Fault, match="some do not arrive"):
        run("exchanged", "never_arrived", False, 0)
    assert np.array_equal(run("copied", "none", False, 0), expected("copied"))


def test_what_is_copied_before_the_kernel_waits_is_what_was_there() -> None:
    assert np.array_equal(run("copied", "asked_early", True, 0, changes=True), expected("copied"))
    late = run("copied", "none", True, 0, changes=True)
    assert np.array_equal(late[:64], np.full(64, 19))
