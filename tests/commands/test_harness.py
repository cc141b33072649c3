"""moeflux-bench: what its JSON lines say, what it refuses, and that it needs nothing of moeflux but moeflux.h."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from golden import checkpoints
from moeflux import Variant, _core
from moeflux.conversion.synth import synth
from moeflux.models.config import variant_from_config
from moeflux.stores.store import open_store
from support.flat import changed
from support.small_variants import DEEPSEEK, QWEN

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "what", "context", "tokens", "seconds", "cpu_seconds", "tokens_per_second", "compute_seconds", "read_wait_seconds",
    "router_seconds", "beside_seconds", "arrived_seconds", "read_busy_seconds", "over_the_bound", "wait_share",
    "bytes_read", "disk_bytes", "disk_bandwidth", "share_of_disk_bandwidth",
    "expert_hits", "expert_misses", "host_hits", "bytes_copied", "hit_rate",
    "look_ahead_reads", "look_ahead_used", "look_ahead_wasted_bytes",
    "look_ahead_recall", "look_ahead_precision", "drafted", "accepted", "submissions", "waits", "allocations",
    "peak_rss_bytes",
    "read_bandwidth", "bytes_touched", "share_of_read_bandwidth", "rep", "load", "threads", "isa", "precision", "kv",
    "engine", "variant", "store", "commit", "compiler", "machine", "sampling", "choosing_seconds",
    "sessions",
}  # fmt: skip

Line = dict[str, Any]

# One layer, for what is counted instruction by instruction.
SMALLEST = changed(
    variant_from_config(checkpoints.CHECKPOINTS["qwen3_moe"]().config).with_layers(1), hidden_size=64, vocab_size=64,
    num_heads=1, num_kv_heads=1, num_experts=2, experts_per_token=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def harness() -> Path:
    """The program, as the build of the package under test left it."""
    editable = Path(_core.__file__).resolve().parents[3] / "bench" / "moeflux-bench"
    sanitized = Path(sys.prefix) / "cmake" / "bench" / "moeflux-bench"
    for program in (editable, sanitized):
        if program.exists():
            return program
    if ROOT / "build" in editable.parents:
        pytest.fail("moeflux-bench is not built: `make setup` turns it on in the editable install")
    pytest.skip("this install has no moeflux-bench: an editable one has")


@pytest.fixture(scope="module", params=[QWEN, DEEPSEEK], ids=["qwen3_5_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Variant]:
    folder = tmp_path_factory.mktemp("harness") / "store"
    synth(folder, request.param)
    return folder, request.param


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness") / "store"
    synth(folder, QWEN)
    return folder


def run(harness: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([harness, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def lines_of(done: subprocess.CompletedProcess[str]) -> list[Line]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- What is measured -------------------------------------------------------------------------------------------


def test_one_line_a_measurement(harness: Path, model: tuple[Path, Variant]) -> None:
    folder, variant = model
    threads, reps = ("1,2", 1) if variant is QWEN else ("1", 2)
    done = run(harness, folder, "--prefill", "5,12", "--decode", 3, "--threads", threads, "--reps", reps)
    lines = lines_of(done)
    assert [(line["threads"], line["rep"], line["what"], line["context"], line["tokens"]) for line in lines] == [
        (int(count), rep, *measured)
        for count in threads.split(",")
        for rep in range(reps + 1)
        for measured in (("prefill", 5, 5), ("decode", 5, 3), ("prefill", 12, 7), ("decode", 12, 3))
    ]
    with open_store(folder) as opened:
        expert_bytes = opened.directory.experts.bytes
    for line in lines:
        check_line(line, folder, variant, expert_bytes)
    assert "medians of the warm walks" in done.stderr


def check_line(line: Line, folder: Path, variant: Variant, expert_bytes: int) -> None:
    assert set(line) == FIELDS
    assert line["tokens_per_second"] == pytest.approx(line["tokens"] / line["seconds"])
    assert 0 < line["compute_seconds"] + line["read_wait_seconds"] <= line["seconds"]
    # Experts that were demanded and not there, those that were guessed rightly, and of the others what had been read
    # when they were given up: whole parts, not always all four.
    whole = (line["expert_misses"] + line["look_ahead_used"]) * expert_bytes
    assert line["bytes_read"] == whole + line["look_ahead_wasted_bytes"]
    assert line["look_ahead_wasted_bytes"] >= 0
    assert line["bytes_read"] >= line["expert_misses"] * expert_bytes
    assert line["rep"] == 0 or line["expert_misses"] == 0
    assert 0 <= line["read_busy_seconds"] <= line["seconds"]
    parts = [line[part] for part in ("router_seconds", "beside_seconds", "arrived_seconds")]
    assert min(parts) >= 0 and parts[0] > 0 and parts[1] > 0 and sum(parts) < line["compute_seconds"]
    assert line["wait_share"] == pytest.approx(line["read_wait_seconds"] / line["seconds"])
    assert line["hit_rate"] == pytest.approx(line["expert_hits"] / (line["expert_hits"] + line["expert_misses"]))
    assert line["disk_bandwidth"] is None and line["share_of_disk_bandwidth"] is None  # every expert has a slot
    assert line["peak_rss_bytes"] > 0 and line["submissions"] >= line["waits"] > 0
    assert line["variant"] == variant.name and line["store"] == str(folder)
    assert set(line["machine"]) == {"cpu", "cores"}
    moe_layers = len(variant.moe_layers)
    experts = line["expert_hits"] + line["expert_misses"]
    if line["what"] == "prefill":
        # Tokens of a chunk share experts.
        assert variant.experts.per_token * moe_layers <= experts
        assert experts <= min(variant.experts.count, line["tokens"] * variant.experts.per_token) * moe_layers
        assert line["bytes_touched"] is None and line["share_of_read_bandwidth"] is None
        return
    assert experts == line["tokens"] * variant.experts.per_token * moe_layers
    assert line["rep"] == 0 or line["allocations"] == 0
    assert line["share_of_read_bandwidth"] == pytest.approx(
        line["bytes_touched"] / line["seconds"] / line["read_bandwidth"]
    )


def test_sessions_that_decode_together(harness: Path, store: Path) -> None:
    """Each number in turn, from the same frontier. A token of each is a step, and they share some of their experts."""
    arguments = ("--prefill", "5,9", "--decode", 4, "--threads", 1, "--reps", 1, "--sampling", "temperature=1")
    lines = lines_of(run(harness, store, *arguments, "--sessions", "3,1"))
    assert [(line["what"], line["context"], line["sessions"], line["tokens"]) for line in lines] == [
        measured
        for _ in range(2)
        for frontier, read in ((5, 5), (9, 4))
        for measured in (
            ("prefill", frontier, 1, read),
            ("decode", frontier, 3, 12),
            ("decode", frontier, 1, 4),
        )
    ]
    picks = QWEN.experts.per_token * len(QWEN.moe_layers)
    for line in lines:
        assert set(line) == FIELDS
        if line["what"] == "prefill":
            continue
        experts = line["expert_hits"] + line["expert_misses"]
        assert 4 * picks <= experts <= line["tokens"] * picks
        assert (line["bytes_touched"] is None) == (line["sessions"] > 1)
        assert 0 < line["choosing_seconds"] < line["seconds"]
    assert any(line["expert_hits"] + line["expert_misses"] < 12 * picks for line in lines if line["sessions"] == 3)


def test_bytes_touched_are_those_of_the_weights(harness: Path, model: tuple[Path, Variant]) -> None:
    """All dense weights but most of the embedding, the experts of one token, and the state, with some padding."""
    folder, variant = model
    [_, cold, *_] = lines_of(run(harness, folder, "--prefill", 1, "--decode", 1, "--threads", 1, "--reps", 1))
    with open_store(folder) as opened:
        directory = opened.directory
        dense = sum(size for tensor in directory.tensors.values() for _, _, size in tensor.spans)
    embedding = variant.vocab_size * variant.hidden_size * 9 // 16  # 4-bit, group 64
    picked = len(variant.moe_layers) * variant.experts.per_token * directory.experts.bytes
    least = dense - embedding + picked
    state = 4 * variant.state_numbers()[0]
    assert least <= cold["bytes_touched"] <= 1.15 * (least + state)


def test_a_step_allocates_nothing(harness: Path, model: tuple[Path, Variant]) -> None:
    """From the second step on, though experts are still being read."""
    done = run(harness, model[0], "--prefill", 1, "--decode", 60, "--threads", 2, "--reps", 1)
    cold, warm = (line for line in lines_of(done) if line["what"] == "decode")
    assert cold["expert_misses"] > 0
    assert (cold["allocations"], warm["allocations"]) == (0, 0)


def test_few_slots_are_read_again_and_again(harness: Path, store: Path) -> None:
    slots = QWEN.experts.per_token
    lines = lines_of(run(harness, store, "--prefill", 4, "--decode", 4, "--threads", 1, "--reps", 1, "--slots", slots))
    assert f"{slots} expert slots" in lines[0]["engine"]
    for line in lines:
        assert line["expert_misses"] > 0
        assert (line["disk_bandwidth"] is None) == (line["what"] == "prefill")
        if line["what"] == "decode":
            assert line["share_of_disk_bandwidth"] == pytest.approx(
                line["bytes_read"] / line["seconds"] / line["disk_bandwidth"]
            )
            bound = max(line["bytes_read"] / line["disk_bandwidth"], line["compute_seconds"])
            assert line["over_the_bound"] == pytest.approx(line["seconds"] / bound)


def test_what_the_look_ahead_did(harness: Path, store: Path) -> None:
    """Recall is the share of the experts to read that it had begun; precision is the share of its reads that was
    wanted."""
    arguments = (harness, store, "--prefill", 4, "--decode", 40, "--threads", 1, "--reps", 0)
    [*_, off] = lines_of(run(*arguments, "--slots", 12, "--look-ahead", "off"))
    assert (off["look_ahead_reads"], off["look_ahead_precision"]) == (0, None) and off["look_ahead_recall"] == 0
    [*_, on] = lines_of(run(*arguments, "--slots", 12, "--look-ahead", "on"))
    assert on["look_ahead_reads"] > 0
    assert on["look_ahead_recall"] == pytest.approx(
        on["look_ahead_used"] / (on["look_ahead_used"] + on["expert_misses"])
    )
    assert on["look_ahead_precision"] == pytest.approx(on["look_ahead_used"] / on["look_ahead_reads"])


def test_bytes_from_the_disk_itself(harness: Path, store: Path) -> None:
    """The bytes are those that the system counts. Direct reads all come from the disk; nothing else does, because the
    file was just written."""
    arguments = (harness, store, "--prefill", 4, "--decode", 4, "--threads", 1, "--reps", 1, "--slots", 4)
    direct = lines_of(run(*arguments, "--reads", "direct"))
    if direct[0]["disk_bytes"] is None:
        pytest.skip("the system does not say what it reads from disks")
    buffered = lines_of(run(*arguments, "--reads", "buffered"))
    cold = lines_of(run(*arguments, "--reads", "buffered", "--cold"))
    if not direct[0]["disk_bytes"]:
        pytest.skip("this folder lies in memory")
    assert all(line["disk_bytes"] >= line["bytes_read"] > 0 for line in direct)
    assert sum(line["disk_bytes"] for line in buffered[2:]) == 0
    assert sum(line["disk_bytes"] for line in cold[2:]) > 0


# With a slot for every expert, what is read says which experts were picked, and nothing else.
DRAWING = ("--prefill", 4, "--decode", 12, "--threads", 1, "--reps", 1, "--look-ahead", "off")
ASKED = ("temperature=1.5,top_p=0.9,min_p=0.001,repetition_penalty=1.1,frequency_penalty=0.1,seed=7", "temperature=1")


@pytest.fixture(scope="module")
def likeliest(harness: Path, store: Path) -> list[Line]:
    return lines_of(run(harness, store, *DRAWING))


@pytest.mark.parametrize("sampling", ASKED)
def test_drawing_tokens_is_measured_and_allocates_nothing(
    harness: Path, store: Path, likeliest: list[Line], sampling: str
) -> None:
    drawn, again = (lines_of(run(harness, store, *DRAWING, "--sampling", sampling)) for _ in range(2))
    for line in drawn:
        assert line["sampling"] == sampling
        assert (line["choosing_seconds"] is None) == (line["what"] == "prefill")
        if line["what"] == "decode":
            assert 0 < line["choosing_seconds"] < line["seconds"]
            assert line["rep"] == 0 or line["allocations"] == 0
    assert {line["sampling"] for line in likeliest} == {"likeliest"}

    def reads(lines: list[Line]) -> list[int]:
        return [line["expert_misses"] for line in lines if line["what"] == "decode"]

    assert reads(drawn) == reads(again) != reads(likeliest)


def test_settings_reach_the_engine(harness: Path, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "lines.json"
    done = run(
        harness, store, "--prefill=9", "--decode=0", "--threads=1", "--reps=1", "--chunk=4", "--isa=portable",
        "--kv=bf16", "--readers=3", "--reads=direct", "--cache=lfu", "--look-ahead=on",
        "--backend=cpu", f"--json={out}",
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == ""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["what"], line["isa"], line["kv"]) for line in lines] == [("prefill", "portable", "bf16")] * 2
    for setting in ("3 readers", "direct reads", "cache lfu", "look-ahead on"):
        assert setting in lines[0]["engine"]
    in_one_chunk = lines_of(run(harness, store, "--prefill", 9, "--decode", 0, "--threads", 1, "--reps", 1))
    assert lines[1]["submissions"] == 3 * in_one_chunk[1]["submissions"]


def test_the_backend_is_the_one_asked_for(harness: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says; and where it is not to be had, that is an error and no other one's figures."""
    asked = ("--prefill", 4, "--decode", 0, "--threads", 1, "--reps", 0)
    monkeypatch.setenv("MOEFLUX_BACKEND", "metal")
    lines = lines_of(run(harness, store, *asked, "--backend", "cpu"))
    assert all(line["engine"].startswith("cpu") for line in lines)
    monkeypatch.delenv("MOEFLUX_BACKEND")
    if sys.platform != "darwin":
        done = run(harness, store, *asked, "--backend", "metal")
        assert done.returncode == 1 and "metal" in done.stderr.lower() and done.stdout == ""


def test_ops_against_the_limits_of_the_same_run(harness: Path, model: tuple[Path, Variant]) -> None:
    folder, variant = model
    done = run(harness, folder, "--prefill", 8, "--decode", 3, "--threads", 1, "--reps", 1, "--roofline")
    limits, *lines = lines_of(done)
    assert limits["what"] == "limits" and limits["read_bandwidth"] > 0 and limits["disk_bandwidth"] > 0
    peaks = limits["multiply_adds"]
    assert peaks and all(peak > 0 for peak in peaks.values())
    measured = [line for line in lines if line["what"] != "op"]
    assert [line["what"] for line in measured] == ["prefill", "decode"] * 2
    assert [line["allocations"] for line in measured if line["rep"] and line["what"] == "decode"] == [0]
    for line in measured:
        ops = [op for op in lines if op["what"] == "op" and (op["of"], op["rep"]) == (line["what"], line["rep"])]
        assert {"matmul", "expert_ffn", "embed", "rms_norm"} <= {op["op"] for op in ops}
        assert 0 < sum(op["seconds"] for op in ops) < line["seconds"]
        for op in ops:
            assert op["share_of_read_bandwidth"] == pytest.approx(
                op["bytes"] / op["seconds"] / limits["read_bandwidth"]
            )
            shortest = [op["bytes"] / limits["read_bandwidth"]]
            if line["isa"] in peaks:
                shortest.append(op["products"] / peaks[line["isa"]])
                assert op["share_of_peak"] == pytest.approx(op["products"] / op["seconds"] / peaks[line["isa"]])
            assert op["share_of_roofline"] == pytest.approx(max(shortest) / op["seconds"])
        [experts] = [op for op in ops if op["op"] == "expert_ffn"]
        assert experts["rows"] == line["tokens"] * variant.experts.per_token * len(variant.moe_layers)
    assert "decode at 8, 1 threads" in done.stderr and "between ops" in done.stderr


def counted(*arguments: object) -> dict[str, Line]:
    done = run(*arguments)
    if sys.platform != "linux" or "cannot be watched" in done.stderr:
        pytest.skip("no process can be watched here")
    return {line["of"]: line for line in lines_of(done)}


def test_a_step_asks_nothing_of_the_system(harness: Path, model: tuple[Path, Variant]) -> None:
    """A step asks the system for nothing once its experts are in memory. Reading them would be asking. A prefill from
    nothing maps the first block of its rows: mmap and madvise."""
    counts = counted(harness, model[0], "--count", "calls", "--prefill", 8, "--decode", 20)
    assert [(of, line["tokens"], line["system_calls"]) for of, line in counts.items()] == [
        ("prefill", 8, 2),
        ("decode", 20, 0),
    ]


def test_instructions_are_counted(harness: Path, tmp_path: Path) -> None:
    """The number is the same twice, except for effects of where things lie in memory. Many tokens take more than one;
    two may take less, because kernels for several rows are others."""
    synth(tmp_path / "store", SMALLEST)
    one, again, many = (
        counted(harness, tmp_path / "store", "--count", "instructions", "--prefill", tokens, "--decode", 0)["prefill"]
        for tokens in (1, 1, 4)
    )
    assert one["what"] == "count" and one["instructions"] > 10_000
    assert again["instructions"] == pytest.approx(one["instructions"], rel=0.001)
    assert many["instructions"] > 1.02 * one["instructions"]


def test_help_teaches_the_protocol(harness: Path) -> None:
    done = run(harness, "--help")
    assert done.returncode == 0
    for word in ("frontier", "checkpoint", "rewound", "thrown away", "--json FILE|-", "Ctrl-C"):
        assert word in done.stdout


# ---- What goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "STORE: expected a folder, found none"),
        (["a", "b"], 'STORE: expected one folder, found "a" and "b"'),
        (["a", "--speed", "9"], 'expected an option of --help, found "--speed"'),
        (["a", "--reps"], "--reps: expected a value, found the end"),
        (["a", "--reps", "1001"], '--reps: expected 0 to 1000, found "1001"'),
        (["a", "--reps", "-1"], 'found "-1"'),
        (["a", "--decode", "2x"], '--decode: expected 0 to 1048576, found "2x"'),
        (["a", "--decode", "99999999999999999999"], 'found "99999999999999999999"'),
        (["a", "--decode="], 'found ""'),
        (["a", "--prefill", "8,"], 'found ""'),
        (["a", "--prefill", "8,8"], "--prefill: expected ascending contexts, found 8 after 8"),
        (["a", "--sessions", "8,0"], '--sessions: expected 1 to 1024, found "0"'),
        (["a", "--threads", "1,0"], '--threads: expected 1 to 1024, found "0"'),
        (["a", "--chunk", "8193"], '--chunk: expected 0 to 8192, found "8193"'),
        (["a", "--backend", "tpu"], '--backend: expected one of auto, cpu, cuda, metal, found "tpu"'),
        (["a", "--isa", "sse"], '--isa: expected one of portable, avx2, avx512, avx512vnni, amx, neon, found "sse"'),
        (["a", "--count", "cycles"], '--count: expected one of calls, instructions, nothing, found "cycles"'),
        (["a", "--kv", "f16"], '--kv: expected one of f32, bf16, q8, found "f16"'),
        (["a", "--readers", "257"], '--readers: expected 0 to 256, found "257"'),
        (["a", "--reads", "mapped"], '--reads: expected one of auto, direct, buffered, found "mapped"'),
        (["a", "--cache", "fifo"], '--cache: expected one of lru, lfu, none, found "fifo"'),
        (["a", "--look-ahead", "yes"], '--look-ahead: expected one of auto, on, off, found "yes"'),
        (["a", "--sampling", "heat=1"], '--sampling: expected NAME=NUMBER with a name of --help, found "heat=1"'),
        (["a", "--sampling", "top_p=0.5,"], "--sampling: expected NAME=NUMBER"),
        (["a", "--sampling", "temperature"], '--sampling temperature: expected a number, found ""'),
        (["a", "--sampling", "top_k=-1"], "--sampling top_k: expected 0 to 2147483647"),
        (["a", "--sampling", "temperature=1,top_p=2"], "--sampling top_p: expected 0 to 1, found 2"),
        (["a", "--json", "/nowhere/x"], '--json: expected a file that can be written, found "/nowhere/x"'),
    ],
)
def test_wrong_arguments(harness: Path, arguments: list[str], message: str) -> None:
    done = run(harness, *arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.startswith("moeflux-bench: ")
    assert done.stdout == ""


def test_a_context_beyond_the_model(harness: Path, store: Path) -> None:
    done = run(harness, store, "--prefill", QWEN.max_context, "--decode", 1, "--threads", 1)
    assert done.returncode == 2
    assert f"below {QWEN.max_context}, the model's, found {QWEN.max_context}" in done.stderr


def test_no_store(harness: Path, tmp_path: Path) -> None:
    done = run(harness, tmp_path, "--threads", 1)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr and done.stdout == ""


def test_interrupted_after_the_call_under_way(harness: Path, store: Path) -> None:
    arguments = [harness, store, "--prefill", "4", "--decode", "2", "--threads", "1", "--reps", "1000"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "moeflux-bench: interrupted" in errors
    for line in [first, *rest.splitlines()]:
        assert set(json.loads(line)) == FIELDS


# ---- What it is made of -----------------------------------------------------------------------------------------


def foreign_includes(bench: Path) -> list[str]:
    sources = sorted([*bench.glob("*.cpp"), *bench.glob("*.h")])
    own = {source.name for source in sources}
    quoted = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
    return [
        f"{source.name}: {name}"
        for source in sources
        for name in quoted.findall(source.read_text())
        if name not in own | {"moeflux.h"}
    ]


def test_no_header_of_moeflux_but_one(tmp_path: Path) -> None:
    if not (ROOT / "bench").is_dir():
        pytest.skip("the sources are not here")
    assert foreign_includes(ROOT / "bench") == []
    (tmp_path / "planted.cpp").write_text('#include "moeflux.h"\n#include "engine/engine.h"\n')
    assert foreign_includes(tmp_path) == ["planted.cpp: engine/engine.h"]
