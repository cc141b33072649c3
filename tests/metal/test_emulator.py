"""The emulated device itself: planted bugs are found, correct kernels near the edge are not blamed, the lint refuses
what it must, and what runs is what NumPy says. With every compiler there is."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from emulator import compilers, gpu, lint
from emulator.build import CUDA, ROOT, library, source
from emulator.compilers import CompileError, Compiler
from emulator.device import ORDERS, Fault, Library
from support.metal import needs_device

SAMPLES = Path(__file__).resolve().parents[1] / "emulator" / "samples"

pytestmark = needs_device


@pytest.fixture(params=compilers.compilers(), ids=lambda compiler: compiler.name)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    return request.param


@functools.cache
def sample(name: str, checked: bool, by: Compiler) -> Library:
    return Library(library(SAMPLES / f"{name}.metal", checked, by), checked)


def zeros(count: int = 64, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(count, dtype)


# ---- The checker ----------------------------------------------------------------------------------------------------

BUGS = {
    # kernel: (buffers, threadgroups of 64, what is said about it)
    "missing_barrier": ([64], 1, r"data race on shared"),
    "barrier_for_other_memory": ([64], 1, r"data race on out"),
    "missing_simdgroup_barrier": ([64], 1, r"data race on shared"),
    "scratch_written_too_early": ([128], 1, r"data race on shared"),
    "groups_share_a_place": ([8], 4, r"data race on out"),
    "group_reads_what_another_writes": ([128], 2, r"data race on out"),
    "atomic_and_plain": ([1], 1, r"data race on out"),
    "read_past_the_end": ([64, 64], 1, r"out of bounds: read of 4 bytes at byte 256 of x, which has 256"),
    "write_before_the_beginning": ([64], 1, r"out of bounds: write of 4 bytes at byte -4 of out"),
    "threadgroup_out_of_bounds": (
        [64],
        1,
        r"out of bounds: write of 4 bytes at byte [12]\d\d of shared, which has 128",
    ),
    "uninitialised": ([64], 1, r"uninitialised threadgroup memory is read: shared, byte"),
    "added_to_uninitialised": ([64], 1, r"uninitialised threadgroup memory is read: shared, byte"),
    "returned_before_the_barrier": ([64], 1, r"divergent barrier: 24 of 64 threads have returned"),
    "different_barriers": ([64], 1, r"divergent barrier: threads wait at different ones"),
    "shuffled_from_an_inactive_lane": ([64], 1, r"simd_shuffle_xor from an inactive lane"),
    "sum_under_a_lane_condition": ([64], 1, r"a simdgroup operation with 16 of 32 lanes active"),
    "half_at_a_simdgroup_barrier": ([64], 1, r"a simdgroup barrier reached by 16 of 32 live lanes"),
    "not_bound": ([64], 1, r"buffer 3, x, is not bound"),
    "misaligned": ([128, 64], 1, r"misaligned read of 4 bytes at byte \d+ of x"),
    "constant_written": ([64], 1, r"x is read-only and is written"),
    "arguments_too_short": ([64, 2], 1, r"buffer 1, sizes: 16 bytes are needed, 8 are bound"),
    "too_much_threadgroup_memory": ([64], 1, r"threadgroup memory: 32784 bytes, over the 32768"),
}


@pytest.mark.parametrize("kernel", BUGS)
def test_planted_bugs_are_found(compiler: Compiler, kernel: str) -> None:
    sizes, groups, said = BUGS[kernel]
    for order in ORDERS:
        with pytest.raises(Fault, match=said):
            sample("bugs", True, compiler).dispatch(kernel, [zeros(n) for n in sizes], (groups,), (64,), order=order)


def test_every_bug_is_in_the_list(compiler: Compiler) -> None:
    assert {*BUGS, "copied"} == set(sample("bugs", True, compiler).names)


def test_a_fault_names_the_line(compiler: Compiler) -> None:
    text = (SAMPLES / "bugs.metal").read_text().splitlines()
    line = next(i for i, text in enumerate(text, 1) if "out[i] = x[i + 1];" in text)
    with pytest.raises(Fault, match=rf"^read_past_the_end at bugs\.metal:{line}: "):
        sample("bugs", True, compiler).dispatch("read_past_the_end", [zeros(), zeros()], (1,), (64,))


def test_overlapping_buffers_are_refused(compiler: Compiler) -> None:
    x = zeros(100)
    with pytest.raises(Fault, match=r"x and out overlap and one is written"):
        sample("bugs", True, compiler).dispatch("copied", [x[:64], x[36:]], (1,), (64,))
    sample("bugs", True, compiler).dispatch("copied", [x[:36], x[36:72]], (1,), (36,), strict=False)


def test_too_many_threads_are_refused(compiler: Compiler) -> None:
    with pytest.raises(Fault, match=r"threads of a threadgroup: 1 to 1024, found 1056"):
        sample("bugs", True, compiler).dispatch("copied", [zeros(2000), zeros(2000)], (1,), (1056,))


def test_a_dispatch_after_a_fault_is_as_good_as_new(compiler: Compiler) -> None:
    device = sample("bugs", True, compiler)
    with pytest.raises(Fault):
        device.dispatch("threadgroup_out_of_bounds", [zeros()], (1,), (64,))
    x, out = np.arange(64, dtype=np.float32), zeros()
    device.dispatch("copied", [x, out], (1,), (64,))
    assert np.array_equal(x, out)


def test_what_was_not_written_shows_without_the_checker(compiler: Compiler) -> None:
    out = zeros()
    sample("bugs", False, compiler).dispatch("uninitialised", [out], (1,), (64,))
    assert (out[:32] == 1).all()
    assert np.isnan(out[32:]).all()


FINE = {
    # kernel: (buffers, threadgroups of 64)
    "exchange_in_a_simdgroup": ([zeros()], 1),
    "exchange_in_device_memory": ([zeros()], 1),
    "both_kinds_of_memory": ([zeros()], 1),
    "halves_side_by_side": ([zeros(256, np.float16)], 4),
    "bytes_side_by_side": ([zeros(256, np.uint8)], 4),
    "counted": ([zeros(1, np.uint32)], 4),
    "rounds_by_simdgroup": ([zeros()], 1),
    "written_after_a_sum": ([zeros()], 1),
    "scratch_used_twice": ([zeros(128)], 1),
    "the_last_element": ([np.arange(100, dtype=np.uint8), zeros(100, np.uint8), np.array(100, np.uint32)], 2),
}


@pytest.mark.parametrize("kernel", FINE)
def test_correct_kernels_are_not_blamed(compiler: Compiler, kernel: str) -> None:
    buffers, groups = FINE[kernel]
    results = set()
    for checked in (False, True):
        for order in ORDERS:
            arguments = [array.copy() for array in buffers]
            sample("fine", checked, compiler).dispatch(kernel, arguments, (groups,), (64,), order=order)
            results.add(b"".join(array.tobytes() for array in arguments))
    assert len(results) == 1


# ---- The language ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("name", "dtype", "tile"), [("float", np.float32, 8), ("half", np.float16, 16)])
def test_templates_and_two_axes(compiler: Compiler, name: str, dtype: type, tile: int, checked: bool) -> None:
    x = np.arange(37 * 21).reshape(37, 21).astype(dtype)
    out, shape = np.zeros((21, 37), dtype), np.array(x.shape, np.uint32)
    groups = (-(-21 // tile), -(-37 // tile))
    sample("features", checked, compiler).dispatch(f"transposed_{name}", [x, out, shape], groups, (tile, tile))
    assert np.array_equal(out, x.T)


def test_rounding(compiler: Compiler) -> None:
    x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1e-30, -3.14159, 1e9, 2**-24, 65520], np.float32)
    to_bfloat, to_half = zeros(8, np.uint16), zeros(8, np.float16)
    sample("features", False, compiler).dispatch("rounded", [x, to_bfloat, to_half], (1,), (8,))
    bits = x.view(np.uint32)
    assert np.array_equal(to_bfloat, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))
    with np.errstate(over="ignore"):
        assert np.array_equal(to_half, x.astype(np.float16))


@pytest.mark.parametrize("checked", [False, True])
def test_lanes(compiler: Compiler, checked: bool) -> None:
    x = np.random.default_rng(1).integers(-50, 50, (2, 32)).astype(np.float32)
    out = np.zeros((8, 2, 32), np.float32)
    sample("features", checked, compiler).dispatch("lanes", [x, out], (1,), (64,))
    lane = np.arange(32)
    expected = [
        *(np.repeat(f(axis=1, keepdims=True), 32, axis=1) for f in (x.sum, x.max, x.min)),
        x[:, lane ^ 3],
        np.concatenate([x[:, 2:], x[:, 30:]], axis=1),
        np.repeat(x[:, 7:8], 32, axis=1),
        np.cumsum(x, axis=1) - x,
        np.repeat((x > 0).sum(axis=1, keepdims=True), 32, axis=1),
    ]
    assert np.array_equal(out, expected)


def test_lanes_meet_at_one_call_and_one_depth(compiler: Compiler) -> None:
    for order in ORDERS:
        out = np.zeros((2, 32), np.float32)
        sample("features", False, compiler).dispatch("at_two_depths", [out], (1,), (64,), order=order)
        assert (out[:, :8] == 8).all() and (out[:, 8:] == 24.5).all()
        sample("features", False, compiler).dispatch("at_two_calls", [out], (1,), (64,), order=order)
        assert (out[:, :8] == 8).all() and (out[:, 8:] == 31).all()


@pytest.mark.parametrize("checked", [False, True])
def test_matrices(compiler: Compiler, checked: bool) -> None:
    rng = np.random.default_rng(2)
    x, y = (rng.integers(-9, 9, (16, 16)).astype(np.float32) for _ in range(2))
    out = np.zeros((16, 16), np.float32)
    sample("features", checked, compiler).dispatch("multiplied", [x, y, out, np.array(16, np.uint32)], (2, 2), (32,))
    assert np.array_equal(out, x @ y)


def test_vectors(compiler: Compiler) -> None:
    x = np.random.default_rng(3).standard_normal((8, 4), dtype=np.float32)
    out = np.zeros_like(x)
    sample("features", False, compiler).dispatch("vectors", [x, out], (1,), (8,))
    expected = np.stack([-x[:, 3], (x * x).sum(axis=1), x[:, 0], x[:, 1]], axis=1).clip(-1, 1)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_functions(compiler: Compiler) -> None:
    x = np.linspace(-20, 20, 64, dtype=np.float32)
    out = np.zeros((5, 64), np.float32)
    sample("features", False, compiler).dispatch("functions", [x, out], (1,), (64,))
    wide = x.astype(np.float64)
    expected = [np.exp(wide), np.log(abs(wide)), abs(wide) ** -0.5, np.tanh(wide), wide * wide + 1]
    np.testing.assert_allclose(out, expected, rtol=3e-7)


# ---- The lint -------------------------------------------------------------------------------------------------------

WRONG = {
    "c_function": "expf",
    "constant_to_device": "address space|device",
    "constant_written": "read-only|const",
    "device_to_threadgroup": "cannot initialize",
    "double_literal": "1.5: a literal without f",
    "double_used": "there is no double",
    "host_library": "the library's namespace is metal",
    "infinity": "fast math may drop infinity",
    "lambda": "there are no lambdas",
    "later_language": "C\\+\\+17|constexpr if",
    "mixed_maximum": "max",
    "no_address_space": "float \\* x: names no address space",
    "no_attribute": "expected an attribute",
    "one_index_twice": "a buffer index is used twice",
    "recursion": "power calls itself",
    "rounded_unseen": "implicit conversion",
    "static_local": "a static variable in sample",
    "sum_of_halves": "lanes exchange float, int and uint",
    "threadgroup_in_a_helper": "a threadgroup variable in shared_sum, which is no kernel",
    "threadgroup_to_device": "first",
    "threadgroup_with_a_value": "expected a threadgroup variable without a value",
    "vector_of_three": "vectors of three are padded",
}


def test_every_wrong_sample_is_in_the_list() -> None:
    assert {path.stem for path in (SAMPLES / "wrong").glob("*.metal")} == set(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_samples_are_refused(compiler: Compiler, name: str) -> None:
    found = lint.faults(SAMPLES / "wrong" / f"{name}.metal", compiler)
    assert any(re.search(WRONG[name], fault) for fault in found), found


@pytest.mark.parametrize("name", ["bugs", "fine", "features"])
def test_samples_are_refused_for_nothing_else(compiler: Compiler, name: str) -> None:
    assert lint.faults(SAMPLES / f"{name}.metal", compiler) == []


# ---- Objects --------------------------------------------------------------------------------------------------------

OBJECTS = {
    # how: (what it prints, what ends it)
    "balanced": ("0", ""),
    "captured": ("0", ""),
    "leaked": ("1", ""),
    "released too often": ("", "a Sample was released too often"),
    "retained when gone": ("", "a Sample was used after it was gone"),
    "told when gone": ("", "a Sample was told to work after it was gone"),
    "block released too often": ("", "a block was released too often"),
}


@pytest.mark.parametrize("how", OBJECTS)
def test_objects_let_go_of_wrongly_are_found(compiler: Compiler, how: str) -> None:
    done = subprocess.run([gpu.objects_program(compiler), how], capture_output=True, text=True, check=False)
    printed, said = OBJECTS[how]
    assert done.stdout.strip() == printed and said in done.stderr
    assert done.returncode == (-signal.SIGABRT if said else 0)


# ---- No compiler ----------------------------------------------------------------------------------------------------


def test_without_a_compiler_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "compilers", lambda: ())
    with pytest.raises(CompileError, match=r"^no compiler for kernels: install clang 19 or newer, or `pip install"):
        compilers.compiler()


def test_libraries_are_those_of_every_clone(compiler: Compiler) -> None:
    """Their names are hashes of what is compiled, in which no clone's folder is."""
    for path in (SAMPLES / "fine.metal", CUDA / "digits.cuh"):
        assert str(ROOT) not in source(path, compiler).text
    assert ROOT not in library(SAMPLES / "fine.metal", False, compiler).parents
