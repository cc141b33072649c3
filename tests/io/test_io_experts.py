"""Experts from a store into slots: right in every layout and mode, and nothing half-read is ever found."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from golden.checkpoint import safetensors_bytes
from golden.gpt_oss import gpt_oss
from moeflux import IoError
from moeflux._core import Experts, FaultPlan, Lease, StoreDirectory, open_mlx, open_packed, supports_direct
from moeflux.models.config import variant_from_config
from support.tiny_stores import MlxFolder, expert_stacks, hybrid, latent, tensors, write_packed

BLOCK = 4096


def packed_bytes(hidden: int, intermediate: int) -> int:
    """Of an expert in the older tools' format: 4-bit at group 64, with bf16 scales and biases."""
    return 3 * (hidden * intermediate // 2 + 2 * hidden * intermediate // 64 * 2)


def make_odd(file: Path) -> None:
    """A header may end in spaces: one, where that makes its data start at an odd byte."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    spaces = b" " * (1 - length % 2)
    file.write_bytes(struct.pack("<Q", length + len(spaces)) + data[8 : 8 + length] + spaces + data[8 + length :])


def in_turns(folder: Path, layers: int = 3, **changes: Any) -> StoreDirectory:
    checkpoint = gpt_oss("turns", num_hidden_layers=layers, layer_types=["full_attention"] * layers, **changes)
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(safetensors_bytes(checkpoint.tensors))
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    make_odd(file)
    return open_mlx(folder, variant_from_config(folder).to_json())


def open_store(kind: str, folder: Path) -> StoreDirectory:
    """mlx: pieces at odd bytes; turns: likewise, and rows of two matrices in turns; packed: experts of no whole blocks;
    blocks: of whole ones; dense: a layer without."""
    if kind == "turns":
        return in_turns(folder, intermediate_size=96, num_local_experts=4)
    if kind == "mlx":
        v = hybrid()
        MlxFolder(tensors(v) | expert_stacks(v), shards=3).write(folder)
        for file in folder.glob("*.safetensors"):
            make_odd(file)
        return open_mlx(folder, v.to_json())
    v = {
        "packed": hybrid(moe_intermediate=64, hidden_size=64),
        "blocks": hybrid(moe_intermediate=256, hidden_size=256),
        "dense": latent(moe_intermediate=64),
    }[kind]
    size = packed_bytes(v.hidden_size, v.experts.intermediate)
    assert (size % BLOCK == 0) == (kind == "blocks")
    write_packed(folder, v, tensors(v), size * v.experts.count, {})
    return open_packed(folder, folder / "packed_experts", v.to_json())


KINDS = ["mlx", "turns", "packed", "blocks", "dense"]


@pytest.fixture(scope="module", params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StoreDirectory:
    return open_store(request.param, tmp_path_factory.mktemp("io") / request.param)


@pytest.fixture(params=["buffered", "direct"])
def mode(request: pytest.FixtureRequest, store: StoreDirectory) -> str:
    if request.param == "direct" and not supports_direct(store.files[0]):
        pytest.skip("this file system has no direct reads")
    return request.param


def keys(store: StoreDirectory) -> list[tuple[int, int]]:
    found = []
    for layer in range(3):
        try:
            store.expert_spans(layer, 0)
        except IndexError:
            continue
        found += [(layer, expert) for expert in range(4)]
    return found


def pieces(store: StoreDirectory, key: tuple[int, int]) -> list[bytes]:
    """Read here, with nothing of ours."""
    whole = {file: Path(store.files[file]).read_bytes() for file in store.expert_files}
    data = b"".join(whole[file][offset : offset + size] for file, offset, size in store.expert_spans(*key))
    return [data[at : at + size] for _, at, size, _, _ in store.experts.pieces]


def landed(experts: Experts, store: StoreDirectory, lease: Lease) -> list[bytes]:
    data, sizes = lease.data, [size for _, _, size, _, _ in store.experts.pieces]
    return [data[at : at + size] for at, size in zip(experts.offsets, sizes, strict=True)]


def read(experts: Experts, key: tuple[int, int], parts: int = 1) -> Lease:
    lease, _ = experts.demand(*key, parts)
    experts.wait(lease)
    return lease


@pytest.mark.parametrize("parts", [1, 2, 3, 100])
def test_every_expert_arrives(store: StoreDirectory, mode: str, parts: int) -> None:
    experts = Experts(store, len(keys(store)), threads=3, mode=mode)
    leases = [(key, experts.demand(*key, parts)) for key in keys(store)]
    for key, (lease, found) in leases:
        assert found == "missing"
        experts.wait(lease)
        assert landed(experts, store, lease) == pieces(store, key)
    assert all(experts.demand(*key)[1] == "ready" for key in keys(store))


def test_the_slot_suits_kernels_and_disks(store: StoreDirectory) -> None:
    """Whole blocks, no overlap, every piece at a cache line; and the same whatever the mode."""
    experts = Experts(store, 1)
    sizes = [size for _, _, size, _, _ in store.experts.pieces]
    ends = [at + size for at, size in zip(experts.offsets, sizes, strict=True)]
    assert experts.slot_bytes % BLOCK == 0 and ends[-1] <= experts.slot_bytes < ends[-1] + BLOCK
    assert all(at % 64 == 0 for at in experts.offsets)
    assert all(at >= end for at, end in zip(experts.offsets, [0, *ends], strict=False))
    if supports_direct(store.files[0]):
        assert Experts(store, 1, mode="direct").offsets == experts.offsets


@pytest.mark.parametrize(
    ("kind", "reads", "bounces"), [("mlx", 9, True), ("turns", 4, True), ("packed", 1, True), ("blocks", 1, False)]
)
def test_reads_of_an_expert(tmp_path: Path, kind: str, reads: int, bounces: bool) -> None:
    """One where it lies in one stretch, nine where it lies in pieces, and one for two pieces whose rows are in turns;
    whole blocks go straight into place."""
    store = open_store(kind, tmp_path / kind)
    experts = Experts(store, 4)
    read(experts, (0, 1))
    assert experts.contiguous == (reads == 1)
    assert (experts.bounce > 0) == (kind == "turns")
    assert experts.counts == (reads, store.experts.bytes)
    if supports_direct(store.files[0]):
        direct = Experts(store, 4, mode="direct")
        assert (direct.bounce > 0) == bounces
        read(direct, (0, 1))
        if not bounces:
            assert direct.counts == (1, store.experts.bytes)


def test_rows_in_turns_that_fill_the_buffer_more_than_once(tmp_path: Path) -> None:
    """Each row lands where it belongs, whether the buffer is full behind its pair or within it."""
    two = dict.fromkeys(("num_local_experts", "num_experts_per_tok", "experts_per_token"), 2)
    store = in_turns(tmp_path / "wide", layers=1, intermediate_size=11_008, hidden_size=96, **two)
    codes = store.experts.pieces[0][2]
    for parts in (1, 5):
        experts = Experts(store, 1, threads=3)
        assert 2 * codes > experts.bounce > 0 and experts.bounce % 96 != 0  # a pair has 96 bytes
        lease = read(experts, (0, 1), parts)
        assert landed(experts, store, lease) == pieces(store, (0, 1)), parts


def test_mlx_pieces_lie_at_odd_bytes(tmp_path: Path) -> None:
    """Or the tests above would not show that a shifted read is put straight."""
    store = open_store("mlx", tmp_path / "mlx")
    assert any(offset % 2 for key in keys(store) for _, offset, _ in store.expert_spans(*key))


def test_no_such_expert(store: StoreDirectory) -> None:
    experts = Experts(store, 2)
    for layer, expert in ((-1, 0), (3, 0), (1, -1), (1, 4)):
        with pytest.raises(IndexError):
            experts.demand(layer, expert)
    assert experts.spare == 2


def test_a_layer_without_experts(tmp_path: Path) -> None:
    experts = Experts(open_store("dense", tmp_path / "dense"), 2)
    with pytest.raises(IndexError, match="layer with experts, found layer 0"):
        experts.demand(0, 0)
    assert experts.spare == 2 and not experts.contains(0, 0)


# ---- Faults -------------------------------------------------------------------------------------------------------


def checked(store: StoreDirectory, experts: Experts, key: tuple[int, int], expected: list[bytes] | None = None) -> bool:
    """Demands an expert: exactly right, or IoError naming a file of the store and the expert forgotten."""
    try:
        lease = read(experts, key, parts=2)
    except IoError as error:
        assert any(Path(file).name in str(error) for file in store.files) or f"expert {key[1]}" in str(error)
        assert not experts.contains(*key)
        return False
    assert landed(experts, store, lease) == (pieces(store, key) if expected is None else expected)
    return True


@pytest.mark.parametrize("kind", ["error", "end_of_file", "interrupt", "short_read", "delay", "wrong_bytes"])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_read_fails_once(store: StoreDirectory, mode: str, kind: str, threads: int) -> None:
    """For every N: when the N-th call goes wrong there are right bytes or a clear error, and right bytes afterwards.
    There is one slot less than there are experts."""
    run = [(1, 1), (1, 3), (2, 1), (2, 3)]
    right = {key: pieces(store, key) for key in run}

    def check(layer: int, expert: int, slot: bytes) -> bool:
        sizes = [size for _, _, size, _, _ in store.experts.pieces]
        return [slot[at : at + n] for at, n in zip(offsets, sizes, strict=True)] == right[layer, expert]

    offsets = Experts(store, 1).offsets
    at, failures = 0, 0
    while True:
        at += 1
        plan = FaultPlan(kind, at)
        experts = Experts(store, 3, threads, mode, fault=plan, check=check if kind == "wrong_bytes" else None)
        failed = [key for key in run if not checked(store, experts, key, right[key])]
        if plan.calls < at:
            break
        failures += len(failed)
        assert len(failed) == (kind in ("error", "end_of_file", "wrong_bytes")), at
        assert experts.stats["failures"] == len(failed)
        assert all(checked(store, experts, key, right[key]) for key in run), "the fault is over"
        assert experts.spare == 3
    assert at > len(run)
    assert failures == (at - 1 if kind in ("error", "end_of_file", "wrong_bytes") else 0)


def test_all_who_wait_hear_of_a_failure(store: StoreDirectory) -> None:
    experts = Experts(store, 2, fault=FaultPlan("error", 1))
    first, _ = experts.demand(*keys(store)[0])
    second, found = experts.demand(*keys(store)[0])
    assert found == "loading"
    with pytest.raises(IoError, match="failed: Input/output error"):
        experts.wait(first)
    with pytest.raises(IoError, match="its read failed before"):
        experts.wait(second)
    assert experts.spare == 1, "the slot is kept while somebody holds it"
    first.release()
    second.release()
    assert experts.spare == 2
    assert checked(store, experts, keys(store)[0])


def test_a_dropped_lease_leaves_the_slot_to_its_reader(store: StoreDirectory) -> None:
    plan = FaultPlan("hold", 1)
    experts = Experts(store, 1, threads=1, fault=plan)
    lease, _ = experts.demand(*keys(store)[0])
    lease.release()
    assert experts.spare == 0, "a thread writes into it"
    plan.release()
    experts.give_up()
    assert experts.spare == 1
    assert checked(store, experts, keys(store)[1])


# ---- Look-ahead ---------------------------------------------------------------------------------------------------


def test_a_right_guess(store: StoreDirectory) -> None:
    experts = Experts(store, 3)
    key = keys(store)[1]
    assert experts.guess(*key)
    assert not experts.guess(*key), "it is there"
    lease, found = experts.demand(*key)
    assert found == "loading"
    experts.wait(lease)
    assert landed(experts, store, lease) == pieces(store, key)
    stats = experts.stats
    assert (stats["guesses"], stats["guesses_used"], stats["joined"], stats["misses"]) == (1, 1, 1, 0)


def test_a_guess_leaves_slots_for_demand(store: StoreDirectory) -> None:
    experts = Experts(store, 3)
    assert experts.guess(*keys(store)[0], keep=2)
    assert not experts.guess(*keys(store)[1], keep=2)


def test_a_failed_guess_is_forgotten(store: StoreDirectory) -> None:
    experts = Experts(store, 2, fault=FaultPlan("error", 1))
    key = keys(store)[0]
    assert experts.guess(*key)
    while experts.contains(*key):
        experts.collect()
    assert checked(store, experts, key)


def test_a_dismissed_guess_is_read_anew(store: StoreDirectory) -> None:
    """Its reads were dropped, but it is still among the guesses: whoever demands that expert must not join it."""
    plan = FaultPlan("hold", 1)
    experts = Experts(store, 3, threads=1, fault=plan)
    first, second = keys(store)[:2]
    assert experts.guess(*first) and experts.guess(*second)  # the one thread is at the first
    experts.dismiss(*second)
    lease, found = experts.demand(*second)
    plan.release()
    experts.wait(lease)
    assert found == "missing" and landed(experts, store, lease) == pieces(store, second)
    lease.release()
    assert checked(store, experts, first)


def test_demand_takes_the_slots_of_guesses(store: StoreDirectory) -> None:
    plan = FaultPlan("hold", 1)
    experts = Experts(store, 3, threads=1, fault=plan)
    for key in keys(store)[:3]:
        assert experts.guess(*key)
    plan.release()
    assert checked(store, experts, keys(store)[3])


# ---- A store that changes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlx", "packed"])
def test_a_store_cut_after_it_was_opened(tmp_path: Path, kind: str) -> None:
    store = open_store(kind, tmp_path / kind)
    file = store.files[store.expert_spans(1, 0)[0][0]]
    os.truncate(file, 3000)
    with pytest.raises(IoError, match=rf"{Path(file).name}: expected at least \d+ bytes, found 3000: it changed"):
        Experts(store, 1)


@pytest.mark.parametrize("kind", ["mlx", "packed"])
def test_a_store_cut_while_it_is_read(tmp_path: Path, kind: str) -> None:
    store = open_store(kind, tmp_path / kind)
    experts = Experts(store, 2)
    experts.check_unchanged()
    file = store.files[store.expert_spans(1, 3)[-1][0]]
    os.truncate(file, 3000)
    with pytest.raises(IoError, match=rf"{Path(file).name}: expected .* found .* has 3000 now"):
        read(experts, (1, 3))
    assert not experts.contains(1, 3)
    with pytest.raises(IoError, match=rf"{Path(file).name}: changed while in use"):
        experts.check_unchanged()


def test_a_store_without_a_file(tmp_path: Path) -> None:
    store = open_store("packed", tmp_path / "packed")
    os.unlink(store.files[-1])
    with pytest.raises(IoError, match=rf"{Path(store.files[-1]).name}: cannot be opened"):
        Experts(store, 1)
