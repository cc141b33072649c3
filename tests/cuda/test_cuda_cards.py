"""One model on two GPUs of a machine: the layers in two ranges, with the bits of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from emulator import cuda_gpu
from moeflux import ArgumentError, BudgetError, DeviceError
from moeflux.cli import main
from moeflux.conversion.synth import synth
from moeflux.machine.memory import resident
from support.engine import tokens
from support.metal import needs_device
from support.tiny_stores import hybrid

pytestmark = needs_device

VOCAB = 384


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cards") / "store"
    kinds = ("linear", "full", "linear")
    synth(folder, hybrid(layer_kinds=kinds, mlp_kinds=("moe",) * 3, vocab_size=VOCAB, num_experts=6))
    return folder


@pytest.fixture(autouse=True)
def two_cards(only_emulated: None, on_cuda: str | None) -> Iterator[None]:
    cuda_gpu.install()
    with cuda_gpu.emulating(devices=2):
        yield
    assert cuda_gpu.live_objects() == 0
    cuda_gpu.remove(on_cuda)


def load(folder: Path, **options: Any) -> moeflux.Model:
    return moeflux.load(folder, **{"backend": "cuda", "memory": None, "context": 64, "readers": 1} | options)


def everything(model: moeflux.Model) -> list[np.ndarray]:
    """Of prompts, steps, several sessions, a fork, a rewind and a snapshot."""
    first, second = model.session(), model.session()
    found = [first.prefill(tokens(9, vocab=VOCAB), logits="all"), second.prefill([5, 6], logits="all")]
    found += [np.stack([first.step(token).numpy() for token in (3, 1)])]
    found += [row.numpy()[None] for row in model.evaluate([(first, [7]), (second, [8])])]
    state, forked = first.snapshot(), first.fork()
    found.append(forked.step(4).numpy()[None])
    first.step(9)
    first.restore(state)
    found.append(first.step(4).numpy()[None])
    second.clear()
    found.append(second.prefill(tokens(4, vocab=VOCAB), logits="all"))
    return found


@pytest.mark.parametrize("options", [{}, {"expert_slots": 4, "host_slots": 3}], ids=["resident", "streamed"])
def test_bits_are_those_of_one_card(store: Path, options: dict[str, Any]) -> None:
    with load(store) as model:
        expected = everything(model)
    with load(store, devices=[0, 1], **options) as model:
        assert repr(model).endswith("2 GPUs)")
        found = everything(model)
    assert len(found) == len(expected) > 6
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_another_card_than_the_first(store: Path) -> None:
    with load(store) as model, load(store, device=1) as other, load(store, devices=[1]) as third:
        expected = model.session().prefill([1, 2, 3]).numpy()
        assert np.array_equal(other.session().prefill([1, 2, 3]).numpy(), expected)
        assert np.array_equal(third.session().prefill([1, 2, 3]).numpy(), expected)


def test_a_card_that_fails(store: Path) -> None:
    """Says so, and the session goes on where it was."""
    with load(store, devices=[0, 1]) as model:
        expected = everything(model)
        session = model.session()
        with cuda_gpu.emulating(devices=2, fail_at=3, fail_in=b"cuLaunchKernel"), pytest.raises(DeviceError):
            session.prefill([1, 2, 3]).numpy()
        session.clear()
        assert all(np.array_equal(a, b) for a, b in zip(everything(model), expected, strict=True))


@pytest.mark.parametrize(
    ("devices", "error", "said"),
    [
        ([0, 0], ArgumentError, "devices: expected each GPU once, found 0 twice"),
        ([0, 2], DeviceError, "cuda: device: expected 0 to 1, as many GPUs as the driver shows, found 2"),
        ([-1, 0], ArgumentError, "devices: expected numbers of GPUs from 0 on, found -1"),
        ("01", ArgumentError, "devices: expected a list of numbers of GPUs, found '01'"),
        ([], ArgumentError, "machines: expected 1 to 256, found 0"),
    ],
)
def test_cards_that_cannot_be(store: Path, devices: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        load(store, devices=devices)


def test_more_cards_than_layers(store: Path) -> None:
    with cuda_gpu.emulating(devices=4), pytest.raises(ArgumentError, match="expected 1 to 3 for 3 layers, found 4"):
        load(store, devices=[0, 1, 2, 3])


def test_budgets_are_those_of_each(store: Path) -> None:
    with load(store, devices=[0, 1], device_memory="64MB") as model:
        assert len(everything(model)) > 6
    with pytest.raises(BudgetError, match="gpu 0: memory: expected at least"):
        load(store, devices=[0, 1], device_memory="1MB")


def test_budgets_below_the_experts(tmp_path: Path) -> None:
    """Of both memories, on each GPU: experts go from the file to the host's and to the GPU's, with the bits of one."""
    kinds = ("linear", "full") * 2
    shape = hybrid(layer_kinds=kinds, mlp_kinds=("moe",) * 4, vocab_size=VOCAB, hidden_size=128, moe_intermediate=256,
                   num_experts=128)  # fmt: skip
    synth(tmp_path / "store", shape)
    with load(tmp_path / "store") as model:
        expected = everything(model)
    there, told = 15_000_000, list[tuple[int, int]]()
    options: dict[str, Any] = {"device_memory": there, "host_slots": 20, "sessions": 4}
    options["memory"] = 2 * (resident().now + (64 << 20))  # the first engine has half of it
    with load(tmp_path / "store", devices=[0, 1], on_progress=lambda *each: told.append(each), **options) as model:
        plans = [card.plan for card in model._cluster._models]
        assert all(2 <= plan.slots < plan.experts and plan.host_slots == 20 for plan in plans)
        assert all(plan.device_bytes <= there for plan in plans)
        found = everything(model)
        memory = model.memory
        assert memory.slots["device"].count == sum(plan.slots for plan in plans)
        assert memory.slots["host"].count == 40
        assert all(0 < slots.filled <= slots.count for slots in memory.slots.values())
        assert 0 < memory.device_held <= 2 * there
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done) and set(totals) == {done[-1]}


def test_the_plan_of_two_cards(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEFLUX_BACKEND", "cuda")
    assert main(["plan", str(store), "--devices", "0,1"]) == 0
    text = capsys.readouterr().out
    assert "gpu 0 " in text and "gpu 1 " in text
    assert main(["plan", str(store), "--devices", "1,1"]) == 2
    assert "devices: expected each GPU once, found 1 twice" in capsys.readouterr().err


def test_info_names_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for count in (1, 2):
        with cuda_gpu.emulating(devices=count):
            assert main(["info"]) == 0
        said += [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("cuda ")]
    assert said == ["an emulated NVIDIA GPU", "0: an emulated NVIDIA GPU; 1: an emulated NVIDIA GPU"]


def test_the_bench_of_two_cards(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", str(store), "--backend", "cuda", "--devices", "0,1", "--prefill", "4", "--decode", "2", "--json"]
    assert main(line) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["phase"], row["state"]) for row in rows] == [
        ("decode", "cold"),
        ("prefill", "cold"),
        ("prefill", "warm"),
        ("decode", "warm"),
    ]
    assert all(row["settings"].endswith("2 GPUs)") for row in rows)
    assert main([*line, "--sessions", "1,2"]) == 2
    assert "--devices: expected none with --sessions" in capsys.readouterr().err


def test_a_processor_has_no_numbers(store: Path) -> None:
    with pytest.raises(ArgumentError, match="device: expected 0, there is one, found 1 of cpu"):
        load(store, backend="cpu", device=1)
