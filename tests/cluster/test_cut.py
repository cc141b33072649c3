"""Cutting layers into ranges: what fits, what is fastest, and what is said when nothing fits."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import ArgumentError, BudgetError, FormatError
from moeflux.cluster.cut import DISK, MEMORY_RATE, Figures, LayerSize, Share, Sizes, cut, shares_of
from moeflux.cluster.machines import Link, Machine, Machines, machines_of
from moeflux.cluster.plan import cluster_plan, forecast, sizes_of
from moeflux.models.presets import PRESETS
from moeflux.stores.planned import planned_store

GB = 10**9
LAYER = LayerSize(dense=GB // 10, experts=64, slot=10**7, picked=8, state=10**7)


def alike(count: int, memory: int | None = 2 * GB, disk: float = 2e9, rate: float = 2e10) -> list[Figures]:
    return [Figures(f"m{number}", memory, disk, rate) for number in range(count)]


def test_equal_machines_get_equal_parts() -> None:
    shares = cut(Sizes((LAYER,) * 12), alike(4))
    assert [share.layers for share in shares] == [(0, 3), (3, 6), (6, 9), (9, 12)]


def test_what_a_share_costs() -> None:
    (share,) = cut(Sizes((LAYER,) * 10, first=GB, last=GB // 2, row=1000, process=GB // 5), alike(1, 6 * GB))
    assert share.dense == 10 * LAYER.dense + GB + GB // 2
    spare = 6 * GB - share.dense - 10 * LAYER.state - GB // 5
    assert share.slots == spare // LAYER.slot < share.experts == 640
    missed = 80 * (1 - share.slots / 640)
    assert math.isclose(share.read, missed * LAYER.slot)
    assert math.isclose(share.read_seconds, share.read / 2e9)
    assert math.isclose(share.compute_seconds, (GB + GB // 2 + 1000 + 80 * LAYER.slot) / 2e10)
    assert share.total <= 6 * GB and share.lacking == 0


def test_a_faster_disk_and_more_memory_get_more_layers() -> None:
    fast = Figures("fast", 6 * GB, 8e9, 2e10)
    slow = Figures("slow", 2 * GB, 1e9, 2e10)
    shares = cut(Sizes((LAYER,) * 12), [slow, fast])
    assert shares[0].layers[1] < 6


sizes = st.builds(
    LayerSize, dense=st.integers(1, 9), experts=st.sampled_from([0, 8, 16]), slot=st.just(1), picked=st.just(2),
    state=st.integers(0, 2),
)  # fmt: skip
figures = st.builds(Figures, st.just("m"), st.integers(5, 80), st.sampled_from([1.0, 3.0]), st.sampled_from([2.0, 9.0]))


@given(st.lists(sizes, min_size=3, max_size=7), st.lists(figures, min_size=1, max_size=3), st.integers(0, 5))
def test_no_other_cut_is_better(layers: list[LayerSize], machines: list[Figures], first: int) -> None:
    model = Sizes(tuple(layers), first=first, last=first, process=1)

    def ranges() -> list[tuple[Share, ...]]:
        found = []
        for borders in itertools.combinations(range(1, len(layers)), len(machines) - 1):
            ends = [0, *borders, len(layers)]
            found.append(shares_of(model, machines, list(itertools.pairwise(ends))))
        return found

    every = ranges()
    fitting = [shares for shares in every if not any(share.lacking for share in shares)]
    if not fitting:
        with pytest.raises(BudgetError) as error:
            cut(model, machines)
        assert error.value.missing == min(max(share.lacking for share in shares) for shares in every)
        return
    found = cut(model, machines)

    def cost(shares: tuple[Share, ...]) -> tuple[float, float]:
        return max(share.seconds for share in shares), sum(share.seconds for share in shares)

    best = min(map(cost, fitting))
    assert cost(found) == pytest.approx(best)


def test_the_machine_that_lacks_memory_is_named_with_what_it_lacks() -> None:
    machines = [Figures("big", 4 * GB), Figures("small", GB // 10), Figures("other", 4 * GB)]
    with pytest.raises(
        BudgetError, match=r"machine small: memory: expected at least 270000000 bytes .* for layers"
    ) as error:
        cut(Sizes((LAYER,) * 12), machines)
    assert error.value.missing == 170_000_000
    assert "big" not in str(error.value) and "expert slots" in str(error.value)


def test_what_cannot_be_cut() -> None:
    with pytest.raises(ArgumentError, match="expected 1 to 2 for 2 layers, found 3"):
        cut(Sizes((LAYER,) * 2), alike(3))
    with pytest.raises(ArgumentError, match="machine m1: layers: expected to begin at 1"):
        shares_of(Sizes((LAYER,) * 3), alike(2), [(0, 1), (2, 3)])
    with pytest.raises(ArgumentError, match="expected all 3 to be on some machine, found 2"):
        shares_of(Sizes((LAYER,) * 3), alike(2), [(0, 1), (1, 2)])


def test_rates_that_nobody_has_measured() -> None:
    (share,) = cut(Sizes((LAYER,)), [Figures("m", 280_000_000)])
    assert share.read_seconds == share.read / DISK and share.compute_seconds == share.touched / MEMORY_RATE


# ---- Models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen3.5-397B-A17B", "gemma-4-26B-A4B", "gpt-oss-120b"])
def test_the_layers_of_a_model_are_all_of_it(name: str) -> None:
    with planned_store(name) as store:
        sizes = sizes_of(store, 4096, 2, "f32")
        tensors = sum(span[2] for tensor in store.directory.tensors.values() for span in tensor.spans)
        twice = sizes.first if store.variant.tied_embeddings else 0
        assert sizes.first + sizes.last + sum(layer.dense for layer in sizes.layers) - twice == tensors
        assert len(sizes.layers) == store.variant.num_layers
        assert sum(layer.experts for layer in sizes.layers) == store.variant.experts.count * len(
            store.variant.moe_layers
        )


def test_a_plan_says_what_a_token_costs() -> None:
    machine = Machine("m", memory=64 * GB, disk=6e9, memory_rate=4e10)
    link = Link(seconds=0.0001, rate=1.25e9)
    plans = forecast("Qwen3.5-397B-A17B", (2, 4, 8), machine, link, context=8192)
    for count, plan in zip((2, 4, 8), plans, strict=True):
        assert plan is not None and len(plan.shares) == count
        hidden, vocab = 4 * 4096, 4 * 248_320
        hops = (count + 1) * 0.0001 + (4 + (count - 1) * hidden + vocab) / 1.25e9
        assert math.isclose(plan.hop_seconds, hops)
        assert math.isclose(plan.tokens_per_second(1), 1 / (hops + sum(share.seconds for share in plan.shares)))
        assert plan.tokens_per_second(100) <= 1 / plan.slowest.seconds
        assert all(share.total <= 64 * GB for share in plan.shares)
    rates = [plan.tokens_per_second(1) for plan in plans if plan is not None]
    assert rates[1] > 2 * rates[0]  # twice the memory: everything has a place there, and nothing is read
    assert all(share.read == 0 for plan in plans[1:] if plan is not None for share in plan.shares)
    assert forecast("Kimi-K2.5", (1,), Machine("m", memory=GB), link, context=8192) == [None]


# ---- Machines ---------------------------------------------------------------------------------------------------


def test_machines_as_they_are_given(tmp_path: Path) -> None:
    assert [machine.name for machine in machines_of(3).machines] == ["1", "2", "3"]
    assert machines_of("2") == machines_of(2)
    listed = [Machine("a"), Machine("b", "10.0.0.2")]
    assert machines_of(listed).machines == tuple(listed)
    file = tmp_path / "machines.json"
    content = {
        "ray": "10.0.0.1:6379",
        "address": "10.0.0.1",
        "link": {"seconds": 0.0002, "rate": "125MB"},
        "machines": [
            {"name": "a", "node": "10.0.0.1", "address": "10.0.0.1", "memory": "8GB", "layers": [0, 2]},
            {"name": "b", "path": "/ssd/m", "disk": "6GB", "memory_rate": 4e10, "layers": [2, 4],
             "options": {"threads": 3}},
        ],
    }  # fmt: skip
    file.write_text(json.dumps(content))
    assert machines_of(file) == Machines(
        (
            Machine("a", "10.0.0.1", address="10.0.0.1", memory=8 * GB, layers=(0, 2)),
            Machine("b", path="/ssd/m", disk=6e9, memory_rate=4e10, layers=(2, 4), options={"threads": 3}),
        ),
        ray="10.0.0.1:6379",
        address="10.0.0.1",
        link=Link(0.0002, 125e6),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected an object"),
        ({"machines": {}}, "machines: expected a list"),
        ({"machines": []}, "expected 1 to 256, found 0"),
        ({"machines": [{}]}, r"machines\[0\]: name: expected one"),
        ({"machines": [{"name": "a"}, {"name": "a"}]}, "names that differ, found 'a' twice"),
        ({"machines": [{"name": "a", "layers": [0, 1]}, {"name": "b"}]}, "layers of all or of none, found none of 'b'"),
        ({"machines": [{"name": "a", "layers": [0]}]}, r"layers: expected \[first"),
        ({"machines": [{"name": "a", "memory": "lots"}]}, "memory"),
        ({"machines": [{"name": "a", "disk": -1}]}, "disk: expected a number above 0"),
        ({"machines": [{"name": "a", "options": {"isa": 1}}]}, "options: expected threads, readers, found 'isa'"),
        ({"machines": [{"name": "a", "options": {"threads": "two"}}]}, "threads: expected a whole number"),
        ({"machines": [{"name": "a", "nodes": 1}]}, "found 'nodes'"),
        ({"machines": [{"name": ""}]}, "name: expected text"),
    ],
)
def test_files_that_list_no_machines(tmp_path: Path, content: object, message: str) -> None:
    file = tmp_path / "machines.json"
    file.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=message) as error:
        machines_of(file)
    assert str(error.value).startswith(str(file))


@pytest.mark.parametrize("given", [0, -1, True, 2.5, None, [1], 257])
def test_what_stands_for_no_machines(given: object) -> None:
    with pytest.raises(ArgumentError, match="machines: expected"):
        machines_of(given)


def test_the_plan_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machines.json"
    each = {"memory": "64GB", "disk": "6GB", "memory_rate": "40GB"}
    file.write_text(json.dumps({"machines": [{"name": f"box{n}", "node": str(n), **each} for n in range(4)]}))
    plan = cluster_plan("Kimi-K2.5", file, context=8192)
    text = str(plan)
    assert all(f"box{number}" in text for number in range(4)) and "tokens/s" in text
    assert plan.to_dict()["shares"][3]["layers"][1] == PRESETS["Kimi-K2.5"].num_layers
    json.dumps(plan.to_dict())


# ---- What the page says -----------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"


def rows() -> list[str]:
    """The table of docs/cluster.md."""
    machine, link = Machine("m", memory=64 * GB, disk=6e9, memory_rate=4e10), Link(seconds=0.0001, rate=1.25e9)
    found = []
    for name in ("Qwen3.5-397B-A17B", "Kimi-K2.5"):
        for count, plan in zip((2, 4, 8), forecast(name, (2, 4, 8), machine, link, context=8192), strict=True):
            assert plan is not None
            there = sum(share.slots for share in plan.shares) / sum(share.experts for share in plan.shares)
            read = sum(share.read for share in plan.shares) / 1e9
            one, many = plan.tokens_per_second(1), plan.tokens_per_second(2 * count)
            cells = [name, f"{count}", f"{there:.0%}", f"{read:.2f} GB", f"{1000 * plan.hop_seconds:.1f} ms"]
            found.append(f"| {' | '.join([*cells, f'{one:.1f}', f'{many:.1f}'])} |")
    return found


def test_the_page_says_what_the_function_computes() -> None:
    page = PAGE.read_text()
    assert [row for row in rows() if row not in page] == []
