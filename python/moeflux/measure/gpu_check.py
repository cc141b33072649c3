"""Compares the GPU of this machine with its CPU: it makes every kernel ready, runs every op on small numbers on both,
then a whole model. Experts on CUDA must have the bits that their definition has on the CPU. This is the content of
`moeflux doctor --metal` and `moeflux doctor --cuda`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from moeflux import _core
from moeflux._core import QuantFormat
from moeflux.conversion.block_noise import block_noise
from moeflux.errors import Error
from moeflux.machine.machine import Machine, this_machine
from moeflux.model import load
from moeflux.models import builtin
from moeflux.ops import Ops
from moeflux.oracle import sampling as oracle
from moeflux.oracle.stored import float_to_bf16, quantize_rows
from moeflux.progress import Progress, Silent

__all__ = ["Check", "GpuReport", "cases", "check_gpu"]

LARGEST_ERROR = 2e-5
"""Of the largest number of a result. Both add in f32, each in an order of its own."""
LEAST_COSINE = 0.99999
TIMES = 5
COMPILERS = 8  # at a time

Array = np.ndarray


@dataclass(frozen=True)
class Check:
    name: str
    failure: str  # nothing when it passed
    note: str
    seconds: float

    def __str__(self) -> str:
        result = f"FAILED  {self.failure}" if self.failure else f"ok      {self.note}"
        return f"  {self.name:<28}{1000 * self.seconds:9.2f} ms  {result}"


@dataclass(frozen=True)
class GpuReport:
    machine: Machine
    device: str
    facts: tuple[tuple[str, str], ...]
    checks: tuple[Check, ...]

    @property
    def failures(self) -> int:
        return sum(bool(check.failure) for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "facts": dict(self.facts),
            "failures": self.failures,
            "checks": [asdict(check) for check in self.checks],
            "machine": self.machine.to_dict(),
        }

    def __str__(self) -> str:
        rows = [
            ("moeflux", self.machine.version),
            ("platform", self.machine.platform),
            ("gpu", self.device),
            *self.facts,
        ]
        lines = [f"{label:<24}{text}" for label, text in rows]
        lines += ["", *(str(check) for check in self.checks), ""]
        total = len(self.checks)
        lines.append(f"{total - self.failures} of {total} passed" if self.failures else f"all {total} passed")
        return "\n".join(lines)


def check_gpu(backend: Literal["metal", "cuda"], progress: Progress | None = None) -> GpuReport:
    """DeviceError when there is no GPU that this backend drives; what does not work on it is in the report."""
    device, facts = _core.metal_facts() if backend == "metal" else _core.cuda_facts()
    files = _core.metal_shader_files() if backend == "metal" else list(_core.cuda_kernel_files())
    ops, checks = list(cases(np.random.default_rng(1), backend)), []
    exact = list(exact_cases(np.random.default_rng(2), backend))
    with (progress or Silent()).task(backend, len(files) + 1 + len(ops) + len(exact) + 1, "checks") as task:
        for check in _checks(backend, files, ops, exact):
            checks.append(check)
            task.advance(1)
    return GpuReport(this_machine(), device, tuple(facts), tuple(checks))


Case = tuple[str, Callable[[Ops], Any]]


def _checks(backend: str, files: list[str], cases: list[Case], exact: list[Case]) -> Iterator[Check]:
    compile = _compile_metal if backend == "metal" else _compile_cuda
    for file in files:
        yield _timed(f"compile {file}", partial(compile, file), times=1)
    opened = _timed("open the GPU", partial(_open, backend), times=1)
    yield opened
    if opened.failure:
        return
    gpu, cpu = Ops(backend), Ops("cpu", threads=1, exact=True)
    for name, run in cases:
        yield _compared(name, gpu, cpu, run)
    for name, run in exact:
        yield _compared(name, gpu, cpu, run, exactly=True)
    yield _timed("a whole model", partial(_whole_model, backend), times=1)


def _compile_metal(file: str) -> str:
    return f"{_core.metal_compile(file)} kernels"


def _compile_cuda(file: str) -> str:
    units = _core.cuda_to_compile(_core.cuda_units(file))
    with ThreadPoolExecutor(COMPILERS) as pool:
        for done in [pool.submit(_core.cuda_make, unit) for unit in units]:
            done.result()
    kernels = f"{len(_core.cuda_kernel_files()[file])} kernels"
    return kernels if units else f"{kernels}, compiled before"


def _open(backend: str) -> str:
    Ops(backend)
    return ""


def _timed(name: str, run: Callable[[], str], times: int) -> Check:
    """Takes the fastest of so many runs. The note is what a run returns."""
    best, note = float("inf"), ""
    for _ in range(times):
        start = time.perf_counter()
        try:
            note = run()
        except Error as error:
            return Check(name, str(error).replace("\n", " ")[:300], "", time.perf_counter() - start)
        best = min(best, time.perf_counter() - start)
    return Check(name, "", note, best)


def _compared(name: str, gpu: Ops, cpu: Ops, run: Callable[[Ops], Any], exactly: bool = False) -> Check:
    found: list[Any] = []

    def on_gpu() -> str:
        found.append(run(gpu))
        return ""

    check = _timed(name, on_gpu, TIMES)
    if check.failure:
        return check
    error = max(map(_error, _arrays(found[0]), _arrays(run(cpu))))
    if any(_error(a, b) for again in found[1:] for a, b in zip(_arrays(again), _arrays(found[0]), strict=True)):
        return Check(name, "twice the same gave other bits", "", check.seconds)
    if error > (0 if exactly else LARGEST_ERROR):
        return Check(name, f"off by {error:.1e} of the largest number", "", check.seconds)
    return Check(name, "", f"off by {error:.0e}" if error else "bit-equal", check.seconds)


def _arrays(result: Any) -> tuple[Array, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _error(found: Array, expected: Array) -> float:
    """The error as a share of the largest number. For numbers that are no floats, it tells whether any differs."""
    if found.dtype != np.float32:
        return float("inf") if not np.array_equal(found, expected) else 0.0
    if not np.isfinite(found).all():
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    return float(np.abs(found - expected).max(initial=0.0)) / scale


def _scores(ops: Ops, seen: int, **how: Any) -> Array:
    """Those of the units that all rows see: the others are infinite."""
    return ops.index_scores(**how)[:, :seen]


def _whole_model(gpu: str) -> str:
    """Runs the model in the package on both: a prompt and some tokens."""
    prompt, tokens = [1, 100, 50, 10, 42, 7, 300, 12], [5, 9, 200, 77]
    rows, seconds = [], []
    for backend in (gpu, "cpu"):
        model = load(builtin.path(), memory=None, backend=backend, precision="exact", context=64, chunk=16)
        session = model.session()
        found = [*session.prefill(prompt, logits="all")]
        start = time.perf_counter()
        found += [session.step(token).numpy() for token in tokens]
        seconds.append((time.perf_counter() - start) / len(tokens))
        rows.append(np.stack(found).astype(np.float64))
    a, b = rows
    cosines = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    if not cosines.min() >= LEAST_COSINE or (a.argmax(1) != b.argmax(1)).any():
        raise Error(f"expected the CPU's logits, found a cosine of {cosines.min():.6f} between the two")
    return f"cosine {cosines.min():.7f}, {1000 * seconds[0]:.1f} ms a token (CPU {1000 * seconds[1]:.1f})"


# ---- Small data -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Matrix:
    format: QuantFormat
    weight: Array
    scales: Array | None = None
    biases: Array | None = None


def _matrix(rng: np.random.Generator, format: QuantFormat, rows: int, columns: int) -> _Matrix:
    numbers = rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))
    if format.is_affine:
        return _Matrix(format, *_core.quantize(numbers, format, 1))
    if format.is_blocks:
        noise = rng.integers(0, 256, rows * format.weight_row_bytes(columns)).astype(np.uint8)
        return _Matrix(format, block_noise(noise, str(format), columns**-0.5).reshape(rows, -1))
    if format.has_float_codes:
        return _float_codes(rng, format, rows, columns)
    if format.element == "BF16":
        return _Matrix(format, float_to_bf16(numbers))
    return _Matrix(format, numbers.astype(np.float16) if format.element == "F16" else numbers)


def _float_codes(rng: np.random.Generator, format: QuantFormat, rows: int, columns: int) -> _Matrix:
    """Codes of every value but those that stand for none. The scales are small."""
    codes = rng.integers(0, 256, (rows, format.weight_row_bytes(columns))).astype(np.uint8)
    if format.bits == 8:
        codes[codes & 127 == 127] = 0
    groups = (rows, columns // format.group_size)
    if format.element == "F8_E4M3":
        wide = rng.uniform(2**-13, 2**-12, groups).astype(np.float32)
        return _Matrix(format, codes, float_to_bf16(wide) if format.scale_type == "BF16" else wide)
    of_exponents = (120, 124) if format.bits == 4 else (112, 116)
    scales = rng.integers(*((24, 40) if format.scale_type == "F8_E4M3" else of_exponents), groups).astype(np.uint8)
    if format.scale_row_bytes(columns) > groups[1]:  # a row begins with a scale of its own
        scales = np.hstack([rng.uniform(0.5, 2, (rows, 1)).astype(np.float32).view(np.uint8), scales])
    return _Matrix(format, codes.view(np.uint32), scales)


def _codes(rows: np.ndarray) -> np.ndarray:
    """As ops take rows in 8 bits: each head is its codes and the two bytes of their scale."""
    codes, scales = quantize_rows(rows)
    return np.concatenate([codes, scales[..., None].view(np.int8)], axis=-1)


def _expert(
    rng: np.random.Generator, format: QuantFormat, hidden: int = 96, wide: int = 64
) -> tuple[_Matrix, _Matrix, _Matrix]:
    hidden, wide = _whole(format, hidden), _whole(format, wide)
    gate, up, down = (_matrix(rng, format, *shape) for shape in ((wide, hidden), (wide, hidden), (hidden, wide)))
    return gate, up, down


def _whole(format: QuantFormat, columns: int) -> int:
    """So many columns, or the next that are whole blocks or groups."""
    return -(-columns // format.whole_columns) * format.whole_columns


def _in_steps(o: Ops, q: Array, k: Array, v: Array) -> Array:
    """Attention by the older engine's kernels. On the CPU, attention is one op."""
    if o.isa:
        return np.asarray(o.attention(q[None], k, v, q.shape[1] ** -0.5)[0])
    return o.attention_values(o.attention_softmax(o.attention_scores(q, k, q.shape[1] ** -0.5)), v)


def _listed(o: Ops, logits: Array) -> list[Array]:
    """The greatest logits of each row. The CPU makes no lists, so what the GPU's are compared with is the oracle's."""
    rows = [oracle.shortlist(row, 0.7) for row in logits] if o.isa else o.shortlist(logits, 0.7)
    return [
        part
        for likeliest, odd, sums, *others in rows
        for part in (np.array([likeliest, odd]), sums.astype(np.float32), *others)
    ]


def exact_cases(rng: np.random.Generator, backend: str) -> Iterator[Case]:
    """Experts whose bits CUDA shares with a definition that the CPU computes: one by one, and of a router's choice."""
    if backend != "cuda":
        return
    for format in (
        *(QuantFormat.affine(bits, 32) for bits in (2, 3, 5, 6)),
        *(QuantFormat.affine(bits, 64) for bits in (4, 8)),
        QuantFormat.affine(4, 128, "F16"),
        QuantFormat.mxfp4(),
    ):
        experts = [_expert(rng, format, 256, 128) for _ in range(3)]
        x = rng.standard_normal((5, 256), dtype=np.float32)
        yield f"bits of experts {format}", partial(_same_experts, x=x, experts=experts)


def _same_experts(ops: Ops, x: Array, experts: list[Any]) -> list[Array]:
    """Every pair by itself, then pairs of an expert together, then one row's choice."""
    together = [(2, [0, 2, 4, 6, 9]), (0, [1, 3, 5]), (1, [7, 8])]
    if ops.isa:
        found = ops.digit_expert_ffn(x, experts, together, 2)
        return [found, found, found[:2]]
    one_by_one = [(expert, [pair]) for expert, pairs in together for pair in pairs]
    return [
        ops.expert_ffn(x, experts, one_by_one, 2),
        ops.expert_ffn(x, experts, together, 2),
        ops.chosen_expert_ffn(x[:1], experts, np.array([[2, 0]], np.int32)),
    ]


def cases(rng: np.random.Generator, backend: str) -> Iterator[Case]:
    """Cases of awkward sizes: each op at least once, and matrices in every format. Metal alone has the older engine's
    attention in steps, and CUDA alone lists of logits."""

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    formats = [QuantFormat.affine(bits, 32) for bits in (2, 3, 4, 5, 6, 8)]
    formats += [QuantFormat.plain(element) for element in ("BF16", "F16", "F32")]
    ids, jobs = np.array([8, 0, 3], np.int32), [(0, [0, 3, 4, 7, 9, 8]), (2, [1, 2]), (1, [5, 6])]
    for format in formats:
        table, x, y = _matrix(rng, format, 37, 352), normal(5, 352), normal(3, 37)
        yield f"matvec {format}", partial(Ops.matmul, x=x[:1], matrix=table)
        yield f"matmul {format}", partial(Ops.matmul, x=x, matrix=table)
        yield f"matmul transposed {format}", partial(Ops.matmul, x=y, matrix=table, transposed=True)
        yield f"embed {format}", partial(Ops.embed, table=table, ids=ids)
        experts = [_expert(rng, format) for _ in range(3)]
        tokens = normal(5, 96)
        yield f"experts {format}", partial(Ops.expert_ffn, x=tokens, experts=experts, jobs=jobs, k=2)
    for format in (
        *(QuantFormat.floats(name) for name in QuantFormat.float_types()),
        *(QuantFormat.blocks(name) for name in QuantFormat.block_types()),
    ):
        columns = _whole(format, 352)
        table, x = _matrix(rng, format, 37, columns), normal(5, columns)
        yield f"matvec {format}", partial(Ops.matmul, x=x[:1], matrix=table)
        yield f"matmul {format}", partial(Ops.matmul, x=x, matrix=table)
        experts, tokens = [_expert(rng, format) for _ in range(3)], normal(5, _whole(format, 96))
        yield f"experts {format}", partial(Ops.expert_ffn, x=tokens, experts=experts, jobs=jobs, k=2)

    x, heads, gates, weight = normal(3, 700), normal(3, 5, 40), normal(3, 5, 40), normal(700)
    yield "rms_norm", lambda o: o.rms_norm(x, weight, 1e-6)
    yield "rms_norm_heads", lambda o: o.rms_norm_heads(heads, weight[:40], 1e-6)
    yield "layer_norm", lambda o: o.layer_norm(x, weight, weight[::-1].copy(), 1e-6)
    yield "gated_rms_norm", lambda o: o.gated_rms_norm(heads, gates, weight[:40], 1e-6)
    yield "swiglu", lambda o: o.swiglu(x, x[::-1].copy())
    yield "residual_add", lambda o: o.residual_add(x, x[::-1].copy())
    yield "bias_add", lambda o: o.bias_add(x, weight)
    yield "sigmoid_gate", lambda o: o.sigmoid_gate(heads, gates)
    outputs, shares, gate = normal(3, 4, 700), normal(3, 4), normal(3)
    yield "combine", lambda o: o.combine(x, outputs, shares, x[::-1].copy(), gate)
    turns = rng.uniform(-3, 3, (3, 10))
    angles = np.stack([np.cos(turns), np.sin(turns)], axis=-1).astype(np.float32)
    for interleaved in (False, True):
        yield f"rope{' interleaved' * interleaved}", partial(Ops.rope, x=heads, angles=angles, interleaved=interleaved)
    kept = normal(9, 700)
    for name, cache in (("f32", kept), ("bf16", float_to_bf16(kept)), ("q8", _codes(kept.reshape(9, 2, 350)))):
        yield f"append {name}", partial(Ops.append, x=x, cache=cache, first=4)

    for name, store in (("f32", lambda a: a), ("bf16", float_to_bf16), ("q8", _codes)):
        for dim, length in ((64, 300), (200, 40), (512, 20)):
            q, k, v = normal(3, 4, dim), store(normal(length, 2, dim)), store(normal(length, 2, dim))
            yield f"attention {dim} {name}", partial(Ops.attention, q=q, k=k, v=v, scale=dim**-0.5)
        latent, k_pe, q, q_pe = store(normal(270, 64)), store(normal(270, 16)), normal(2, 5, 64), normal(2, 5, 16)
        yield (
            f"mla_attention {name}",
            partial(Ops.mla_attention, q_latent=q, q_pe=q_pe, latent=latent, k_pe=k_pe, scale=0.1),
        )
        asked, worth, keys = normal(3, 6, 40), normal(3, 6), store(normal(303, 40))
        yield (
            f"index_scores {name}",
            partial(_scores, seen=301, q=asked, keys=keys, weights=worth, scale=0.2, first_position=300),
        )
        chosen = np.arange(0, 300, 3, dtype=np.int32)
        yield f"gather_rows {name}", partial(Ops.gather_rows, rows=keys, ids=chosen, position=302)
    scores = normal(3, 1000)
    yield "index_select", lambda o: o.index_select(scores, 200, first_position=997)
    query, k, v = normal(4, 64), normal(300, 2, 64), normal(300, 2, 64)
    if backend == "metal":
        yield "attention in steps", lambda o: _in_steps(o, query, k, v)
    rows, before, taps = normal(5, 67), normal(3, 67), normal(67, 4)
    yield "conv1d", lambda o: o.conv1d(rows, before, taps)
    alpha, b, a_log, dt_bias = normal(3, 5), normal(3, 5), normal(5), normal(5)
    yield "delta_gates", lambda o: o.delta_gates(alpha, b, a_log, dt_bias)
    unit = normal(5, 2, 64) / 8
    gated = (unit, unit[::-1].copy(), normal(5, 4, 33), rng.uniform(0, 1, (5, 4)).astype(np.float32))
    beta, state = rng.uniform(0, 1, (5, 4)).astype(np.float32), normal(4, 33, 64)
    yield "gated_delta", lambda o: o.gated_delta(*gated, beta, state)

    logits, bias = 3 * normal(3, 256), normal(256) / 3
    yield "route_softmax", lambda o: o.route_softmax(logits, 8, normalize=True)
    yield (
        "route_grouped",
        lambda o: o.route_grouped(logits, bias, 8, groups=8, groups_kept=4, normalize=True, scaling=2.5),
    )
    vocabulary = normal(9000)
    yield "top_k", lambda o: o.top_k(vocabulary, 40)
    if backend == "cuda":
        yield "shortlist", partial(_listed, logits=3 * normal(2, 9000))
