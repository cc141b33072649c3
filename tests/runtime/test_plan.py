"""What a plan says: that its parts add up, what a budget buys, what is refused, what is known of the speed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest

import moeflux
from golden import checkpoints
from moeflux import ArgumentError, BudgetError, FormatError, NotFoundError, Plan, _core, model
from moeflux.cli import main
from moeflux.conversion.convert import convert
from moeflux.conversion.synth import synth
from moeflux.living import Living
from moeflux.machine.memory import Available
from moeflux.machine.remembered import Probe, remember
from moeflux.machine.sandbox import RENDERING
from moeflux.measure.record import record
from moeflux.models.presets import PRESETS
from moeflux.routing.hit_rates import hit_rate, remember_replay
from moeflux.routing.replay import replay
from moeflux.routing.trace import Trace
from moeflux.runtime import plan as planning
from moeflux.runtime.plan import plan
from moeflux.stores.store import open_store
from support.engine import Folder, folders, tokens
from support.flat import changed

MIB = 1 << 20
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A3B in everything but the number of layers, experts and tokens."""
    path = tmp_path_factory.mktemp("plan") / "a3b"
    shape = PRESETS["Qwen3.6-35B-A3B"].with_layers(4)
    synth(path, changed(shape, vocab_size=512, num_experts=24))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process every time: a plan is to be compared with another."""
    monkeypatch.setattr(planning._Planner, "process_parts", lambda self: {"process": 64 * MIB, "text": 0})


def machine(monkeypatch: pytest.MonkeyPatch, free: int, limited: bool = False) -> None:
    monkeypatch.setattr(planning, "available", lambda: Available(free, "free on this machine", limited))


# ---- What a budget buys -----------------------------------------------------------------------------------------


def test_the_parts_add_up(store: Path) -> None:
    found = plan(store, memory="300MB")
    assert sum(found.parts.values()) == found.total_bytes
    assert found.floor_bytes <= found.total_bytes <= found.budget_bytes == 300_000_000
    assert found.unspent_bytes == 300_000_000 - found.total_bytes < found.slot_bytes + 100_000
    assert found.parts["expert slots"] == found.slots * found.slot_bytes


def test_more_memory_is_never_worse(store: Path) -> None:
    floor = plan(store, memory="1TB").floor_bytes
    before: Plan | None = None
    for budget in range(floor, 900_000_000, 37_000_000):
        found = plan(store, memory=budget)
        assert found.total_bytes <= budget
        assert found.slots >= 16, "twice the experts of a token"
        if before:
            assert (found.slots, found.context) >= (before.slots, 0)
            assert found.context >= before.context
        before = found
    assert before is not None
    assert before.slots == before.experts == 96
    assert before.context == 32768


def test_at_the_floor_everything_is_least(store: Path) -> None:
    floor = plan(store, memory="1TB").floor_bytes
    found = plan(store, memory=floor)
    assert (found.total_bytes, found.slots, found.context, found.chunk) == (floor, 16, 1024, 32)
    with pytest.raises(BudgetError) as error:
        plan(store, memory=floor - 1)
    text = str(error.value)
    assert f"expected at least {floor} bytes" in text
    assert all(
        word in text for word in ("dense weights", "expert slots", "1 x 1024 tokens", f"found {floor - 1} bytes")
    )


def test_a_long_context_leaves_half_to_experts(store: Path) -> None:
    found = plan(store, memory="350MB")
    spare = found.budget_bytes - (found.total_bytes - found.session_bytes - found.parts["expert slots"])
    assert 1024 < found.context < 32768
    assert found.session_bytes <= spare / 2 + 8 * MIB  # what the larger chunk took later
    asked = plan(store, memory="350MB", context=found.context + 3000)
    assert asked.context == found.context + 3000
    assert asked.slots < found.slots


def test_what_is_asked_for_is_taken(store: Path) -> None:
    found = plan(store, memory="500MB", context=3000, sessions=3, kv_dtype="bf16", expert_slots=40, chunk=77, readers=3)
    assert (found.context, found.sessions, found.slots, found.chunk, found.readers) == (3000, 3, 40, 77, 3)
    one = plan(store, memory="500MB", context=3000, kv_dtype="f32", expert_slots=40, chunk=77, readers=3)
    assert abs(found.parts["keys and values"] / one.parts["keys and values"] - 1.5) < 0.01
    assert found.parts["recurrent state"] == 3 * one.parts["recurrent state"]
    with pytest.raises(BudgetError, match="fewer sessions"):
        plan(store, memory="500MB", context=3000, sessions=100)
    with pytest.raises(BudgetError, match="the floor"):
        plan(store, memory="240MB", expert_slots=90)


def test_without_a_limit_everything_has_its_place(store: Path) -> None:
    found = plan(store, memory=None)
    assert (found.budget_bytes, found.unspent_bytes, found.session_limit) == (None, 0, 0)
    assert (found.slots, found.context, found.chunk) == (96, 32768, 512)


def test_auto_is_what_is_free_less_a_reserve(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 1000 * MIB)
    found = plan(store)
    own = found.budget_bytes - 900 * MIB
    assert MIB < own < 4000 * MIB, "what this process has is its own"
    assert "less a reserve" in found.budget_source
    machine(monkeypatch, 100 * MIB)
    monkeypatch.setattr(planning, "resident", lambda: type("Resident", (), {"anonymous": 0, "now": 0})())
    with pytest.raises(BudgetError, match=r"auto: 104\.86 MB free on this machine"):
        plan(store)


def test_other_models_are_counted(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(planning, "LOADED", Living())  # whatever other tests have left
    monkeypatch.setattr(model, "LOADED", planning.LOADED)
    first = moeflux.load(store, memory="1TB", context=100)
    assert plan(store, memory="1TB", context=100).parts["other models"] == first.plan.model_bytes
    second = moeflux.load(store, memory="1TB", context=100)
    assert second.plan.parts["other models"] == first.plan.model_bytes
    assert second.plan.total_bytes == first.plan.total_bytes + second.plan.model_bytes
    third = moeflux.load(store, memory="1TB", context=100)
    assert third.plan.parts["other models"] == 2 * first.plan.model_bytes
    del first, second, third
    assert "other models" not in moeflux.load(store, memory="1TB", context=100).plan.parts


def test_a_process_has_one_renderer(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(planning, "LOADED", Living())
    monkeypatch.setattr(model, "LOADED", planning.LOADED)
    assert plan(store, memory="1TB", context=100).parts["renderer"] == 0
    first = moeflux.load(moeflux.builtin.path(), memory="1TB", context=100)
    assert first.plan.parts["renderer"] == RENDERING.max_resident
    assert "\n  renderer " in str(first.plan)
    for path in (moeflux.builtin.path(), store):
        both = plan(path, memory="1TB", context=100)
        assert both.parts["renderer"] == RENDERING.max_resident, "it is there already"
        assert both.parts["other models"] == first.plan.model_bytes


# ---- How experts are read ---------------------------------------------------------------------------------------


def test_a_store_is_planned_before_it_is_there(store: Path, tmp_path: Path) -> None:
    """From its config alone, to the byte but for the router, which a conversion gives more bits."""
    shutil.copy(store / "config.json", tmp_path / "config.json")
    for place in (tmp_path, tmp_path / "config.json"):
        before, after = plan(place, memory="1GB"), plan(store, memory="1GB")
        parts, dense = after.parts, after.parts["dense weights"]
        assert before.parts | {"dense weights": dense} == parts
        assert 0.99 * dense < before.parts["dense weights"] < dense
        assert (before.slot_bytes, before.expert_bytes_per_token) == (after.slot_bytes, after.expert_bytes_per_token)
        assert before.note == "of a store with every matrix 4-bit g64, which is not here yet" and after.note == ""
        assert before.note in str(before) and "note" not in str(after)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "deepseek_v3_fp8", "kimi_k25"])
def test_a_checkpoint_is_planned_as_it_will_be_converted(name: str, tmp_path: Path) -> None:
    """Experts to the byte, also those that are int4 already; other matrices nearly, for routers get more bits."""
    checkpoint = checkpoints.write(name, tmp_path / "hf")
    convert(checkpoint, tmp_path / "store")
    before, after = plan(checkpoint, memory="1GB"), plan(tmp_path / "store", memory="1GB")
    assert before.note.startswith("of the store that `moeflux convert` makes of it, with every matrix 4-bit")
    assert (before.slots, before.slot_bytes, before.context) == (after.slots, after.slot_bytes, after.context)
    assert 0.8 < before.parts["dense weights"] / after.parts["dense weights"] < 1.1


def test_a_preset_is_planned_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = plan("a3b", memory="8GB", context=4096)
    assert found.model == "Qwen3.6-35B-A3B" and found.experts == 10_240
    assert found.total_bytes <= 8_000_000_000 and found.slots > 2_000
    assert found.tokens_per_second is None and "`moeflux doctor` here does" in str(found)
    remember(Path(), PROBE)
    again = plan("a3b", memory="8GB", context=4096)
    assert again.tokens_per_second is not None and again.tokens_per_second > 0.5
    with pytest.raises(BudgetError, match="the floor of Qwen3"):
        plan("a3b", memory="1GB")
    with pytest.raises(NotFoundError, match="a repository as owner/name or a preset, found nothing of that name"):
        plan("nothing")


def test_the_config_says_in_how_many_bits(store: Path, tmp_path: Path) -> None:
    config = json.loads((store / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 8, "group_size": 32}}))
    assert "every matrix 8-bit g32" in plan(tmp_path, memory="1GB").note
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 7}}))
    with pytest.raises(FormatError, match="quantization: bits: expected 2, 3, 4, 5, 6 or 8, found 7"):
        plan(tmp_path, memory="1GB")


def test_options_are_those_of_load(store: Path) -> None:
    for call in (plan, moeflux.load):
        with pytest.raises(ArgumentError, match=r"options: expected memory, device_memory, context, .*, found memry"):
            call(store, memry="8GB")
        with pytest.raises(ArgumentError, match='cache: expected one of lru, lfu, none, found "random"'):
            call(store, cache="random")
        with pytest.raises(ArgumentError, match="look_ahead: expected one of auto, on, off, found 3"):
            call(store, look_ahead=3)
        with pytest.raises(ArgumentError, match="backend: expected a name, found 3"):
            call(store, backend=3)


def test_reads(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _core.supports_direct(open_store(store).expert_files[0]):
        pytest.skip("this file system has no direct reads")
    machine(monkeypatch, 4000 * MIB)
    assert plan(store, memory="1GB").reads == "buffered"
    assert plan(store, memory="300MB").reads == "direct"
    assert plan(store, memory="300MB", reads="buffered").reads == "buffered"
    machine(monkeypatch, 300 * MIB)
    assert plan(store, memory="1GB").reads == "direct", "the page cache would crowd others out"
    remember(store, dataclasses.replace(PROBE, reads="buffered"))
    assert plan(store, memory="300MB").reads == "buffered"
    assert plan(store, memory="300MB").readers == 2
    machine(monkeypatch, 300 * MIB, limited=True)
    assert plan(store, memory="300MB").reads == "direct", "in a control group the page cache is ours too"
    with pytest.raises(ArgumentError, match='reads: expected one of auto, direct, buffered, found "mapped"'):
        plan(store, reads="mapped")


def test_where_there_are_no_direct_reads(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "supports_direct", lambda path: False)
    found = plan(store, memory="300MB")
    assert (found.reads, found.parts["read buffers"]) == ("buffered", 0)


# ---- The speed --------------------------------------------------------------------------------------------------

PROBE = Probe(2e9, 2e10, "direct", 2, 1769472, datetime(2026, 2, 3, 4, 5, 6, tzinfo=timezone.utc))


def test_without_a_probe_it_is_unknown(store: Path) -> None:
    found = plan(store, memory="300MB")
    assert found.tokens_per_second is None
    assert "`moeflux doctor`" in str(found)


def test_with_a_probe_it_is_reads_and_compute(store: Path) -> None:
    remember(store, PROBE)
    found = plan(store, memory="300MB")
    with open_store(store) as opened:
        expert = opened.directory.experts.bytes
        dense = sum(span[2] for tensor in opened.directory.tensors.values() for span in tensor.spans)
    assert found.expert_bytes_per_token == 4 * 8 * expert
    read = 4 * 8 * expert * (1 - found.slots / 96)
    assert found.bytes_read_per_token == pytest.approx(read)
    seconds = read / 2e9 + (dense + 4 * 8 * expert) / 2e10
    assert found.tokens_per_second == pytest.approx(1 / seconds, rel=0.02)  # but for the embedding's other rows
    assert "tokens/s" in str(found)
    assert "2026-02-03" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["probe"]["when"].startswith("2026-02-03")


def test_the_hit_rate_of_a_trace(folder: Folder) -> None:
    path = folder("qwen3_5_moe")
    model = moeflux.load(path, memory="1TB", context=100)
    trace = record(model, tokens(60), 10)
    slots = 20
    options = {"memory": "1TB", "expert_slots": slots}
    assumed = plan(path, **options)
    assert assumed.hit_rate == slots / assumed.experts
    assert "assumed" in assumed.hit_rate_source
    measured = plan(path, trace=trace, **options)
    expected = replay(trace, [slots], ["lru"]).curves["lru"][0].hit_rate
    assert measured.hit_rate == expected != assumed.hit_rate

    remember_replay(replay(trace, [10, slots, 40]))
    known = plan(path, **options)
    assert known.hit_rate == pytest.approx(expected)
    assert "measured" in known.hit_rate_source
    assert plan(path, memory="1TB", expert_slots=30).hit_rate > expected
    assert plan(path, cache="none", **options).hit_rate == 0
    assert plan(path, memory="1TB").hit_rate == 1
    # A shorter trace says less than the one that is known.
    short = dataclasses.replace(trace, experts=trace.experts[:5], passes=np.array([5]))
    assert remember_replay(replay(short)) is None
    with pytest.raises(ArgumentError, match="trace: expected one of the model"):
        plan(path, trace=dataclasses.replace(trace, fingerprint="f" * 64), **options)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "fingerprint": 5}'])
def test_damaged_hit_rates_are_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cache" / f"hits-{'a' * 16}.json"
    file.parent.mkdir()
    file.write_text(text)
    assert "assumed" in hit_rate("a" * 64, "lru", 5, 10).source


def test_a_trace_of_nobody_is_not_remembered(folder: Folder) -> None:
    trace = Trace("x", "", 4, 100, (0,), np.zeros((3, 1, 2), np.uint16), np.array([3]))
    assert remember_replay(replay(trace)) is None


# ---- Loading by it ----------------------------------------------------------------------------------------------


def test_a_model_is_loaded_by_its_plan(store: Path) -> None:
    model = moeflux.load(store, memory="300MB", kv_dtype="bf16", context=2000)
    said = plan(store, memory="300MB", kv_dtype="bf16", context=2000)
    assert model.plan == said
    session = model.session()
    assert (session.max_context, session.kv_dtype) == (2000, "bf16")
    rows = said.parts["keys and values"]  # taken as they are used
    assert model.memory.held == {name: said.parts[name] for name in model.memory.held} | {"keys and values": 0}
    later = said.parts["choosing"] + said.parts["passing states"]
    assert model._engine.held == said.model_bytes - later - rows
    assert all(word in str(model.memory) for word in ("planned", "held", "resident", "at its peak"))


def test_sessions_draw_on_what_is_left(store: Path) -> None:
    model = moeflux.load(store, memory=plan(store, memory="1TB", context=500).total_bytes, context=500)
    assert model.plan.unspent_bytes == 0
    held = model.session()
    with pytest.raises(BudgetError, match="close a session, ask for less"):
        model.session()
    del held
    with pytest.raises(BudgetError):
        model.session(max_context=5000)
    roomy = moeflux.load(store, memory="1TB", context=500)
    sessions = [roomy.session(max_context=5000) for _ in range(3)]
    assert len(sessions) == 3


def test_a_budget_changes_no_bit(store: Path) -> None:
    prompt = [7 * i % 512 for i in range(34)]  # two chunks at the floor
    found = []
    floor = plan(store, memory="1TB", context=300).floor_bytes
    for memory in (floor, floor + 60_000_000, "1TB", None):
        session = moeflux.load(store, memory=memory, context=300).session()
        rows = session.prefill(prompt, logits="all")
        found.append(np.concatenate([rows, session.step(5).numpy()[None]]))
    assert all(np.array_equal(each, found[0]) for each in found[1:])


def test_more_experts_than_the_engine_can_choose_from(tmp_path: Path) -> None:
    shape = PRESETS["Qwen3.6-35B-A3B"].with_layers(1)
    small = changed(
        shape, name="wide", vocab_size=64, hidden_size=64, num_experts=4097, moe_intermediate=64, num_heads=2
    )
    synth(tmp_path / "wide", small)
    with pytest.raises(FormatError, match=r"num_experts: expected at most 4096 experts in a layer, .* found 4097"):
        moeflux.load(tmp_path / "wide")
    with pytest.raises(FormatError, match=str(tmp_path / "wide")):
        plan(tmp_path / "wide")


# ---- The command ------------------------------------------------------------------------------------------------


def test_the_command(store: Path, capsys: Output) -> None:
    assert main(["plan", str(store), "--memory", "300MB", "--context", "2000", "--kv-dtype", "bf16"]) == 0
    text = capsys.readouterr().out
    assert text.strip() == str(plan(store, memory="300MB", context=2000, kv_dtype="bf16"))
    for word in ("floor", "process", "dense weights", "expert slots", "scratch", "total", "hit rate", "read per token"):
        assert f"\n{word}" in text or f"\n  {word}" in text


def test_the_command_as_json(store: Path, capsys: Output) -> None:
    assert main(["plan", str(store), "--memory", "300MB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["parts"].values()) == found["total_bytes"] <= 300_000_000
    assert found["slots"] * found["slot_bytes"] == found["parts"]["expert_slots"]
    assert 0 < found["floor_bytes"] < found["total_bytes"]


@pytest.mark.parametrize("flags", [["--memory", "lots"], ["--memory", "5MB"], ["--context", "99999999"]])
def test_the_command_refuses(store: Path, flags: list[str], capsys: Output) -> None:
    assert main(["plan", str(store), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moeflux plan: ")
    assert err.count("\n") == 1


def test_the_command_takes_a_trace(folder: Folder, tmp_path: Path, capsys: Output) -> None:
    path, file = str(folder("qwen3_5_moe")), str(tmp_path / "run.trace")
    assert main(["trace", path, "-o", file, "--tokens", "30"]) == 0
    assert main(["plan", path, "--trace", file, "--expert-slots", "20"]) == 0
    assert "measured: lru on a trace of 30 tokens" in capsys.readouterr().out
    assert main(["replay", file]) == 0
    assert main(["plan", path, "--expert-slots", "20"]) == 0
    assert "that was replayed" in capsys.readouterr().out
