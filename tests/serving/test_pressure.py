"""When there is no memory left: idle branches go, then the youngest gives way. Nobody who was accepted gets an error,
and no answer changes by a bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moeflux
from moeflux import Sampling, _core
from moeflux.serving import Request, Scheduler
from moeflux.stores.store import open_store
from support.engine import Folder, load_faulty
from support.served import Alone, Gate, ask, text, until

NAMES = ("qwen3_5_moe", "qwen3_moe")
CONTEXT = 768
BLOCK = 256


@pytest.fixture(scope="module")
def alone(folder: Folder) -> dict[str, Alone]:
    return {name: Alone(load_faulty(folder(name))) for name in NAMES}


def small(folder: Path, sessions: int, blocks: int) -> moeflux.Model:
    """With memory for so many sessions of CONTEXT tokens, and so many blocks of rows for all of them together."""
    with open_store(folder) as store:
        parts = _core.footprint(store.directory, max_context=CONTEXT)
    fixed = parts.sessions - parts.rows
    model = load_faulty(folder, session_bytes=sessions * fixed + blocks * parts.rows * BLOCK // CONTEXT)
    model.session = lambda *_: moeflux.Model.session(model, CONTEXT)  # type: ignore[method-assign]
    return model


@pytest.fixture(params=["no disk", "disk"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    yield None if request.param == "no disk" else tmp_path / "states"


@pytest.mark.parametrize("name", NAMES)
def test_the_youngest_gives_way_and_goes_on_later(
    folder: Folder, alone: dict[str, Alone], name: str, disk: Path | None, pytestconfig: pytest.Config
) -> None:
    """Three that grow out of their first block, with blocks for one of them alone."""
    # Through which the host and a device exchange states.
    more_memory = pytestconfig.getoption("--apart") or pytestconfig.getoption("--on-cuda")
    model = small(folder(name), 2, 3)
    requests = [ask(seed, 240, max_tokens=40) for seed in (1, 2, 3)]
    gate = Gate()
    with Scheduler(model, decoder=gate, running=3, prompt_rows=64, checkpoints=1, disk=disk) as scheduler:
        answers = [scheduler.submit(request) for request in requests]
        gate.wait()
        gate.open()
        for request, answer in zip(requests, answers, strict=True):
            assert (answer.wait().tokens, answer.finish) == alone[name](request)
        put_aside = [answer.put_aside for answer in answers]
        assert put_aside[0] == 0 and scheduler.stats.put_aside == sum(put_aside)
        assert sum(put_aside) > 0 or more_memory
        assert disk is None or more_memory or scheduler.stats.saved > 0, "states went there"
        assert scheduler.stats.failed == 0


def test_who_gave_way_does_not_come_back_while_those_still_run(folder: Folder, alone: dict[str, Alone]) -> None:
    """It would have to give way again and again."""
    model = small(folder("qwen3_moe"), 3, 3)
    with Scheduler(model, running=3, prompt_rows=64, checkpoints=1) as scheduler:
        requests = [ask(seed, 250, max_tokens=100) for seed in (1, 2, 3)]
        answers = [scheduler.submit(request) for request in requests]
        for before, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            assert answer.wait().tokens == alone["qwen3_moe"](request)[0]
            assert answer.put_aside <= before


@pytest.mark.parametrize("name", NAMES)
def test_idle_ones_go_first(folder: Folder, alone: dict[str, Alone], name: str) -> None:
    model = small(folder(name), 3, 3)
    with Scheduler(model, running=1, checkpoints=1) as scheduler:
        for seed in range(1, 5):
            request = ask(seed, 500)
            assert scheduler.submit(request).wait().tokens == alone[name](request)[0]
        assert scheduler.stats.put_aside == 0 and scheduler.stats.idle < 4


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_goes_on_in_its_session_where_there_is_no_memory_for_another(
    folder: Folder, alone: dict[str, Alone], name: str
) -> None:
    model = small(folder(name), 1, 3)
    with Scheduler(model, running=1, checkpoints=1) as scheduler:
        said: list[int] = []
        for turn in range(4):
            request = Request(said + text(60, turn), max_tokens=5, sampling=Sampling(1.0, seed=turn))
            answer = scheduler.submit(request).wait()
            assert answer.tokens == alone[name](request)[0]
            assert answer.stats.reused_tokens == max(len(said) - 1, 0)
            said = [*request.prompt, *answer.tokens]


@pytest.mark.parametrize("name", NAMES)
def test_so_does_one_that_goes_back(folder: Folder, alone: dict[str, Alone], name: str) -> None:
    """To an earlier place, where no memory is left for a fork from there."""
    model = small(folder(name), 1, 3)
    with Scheduler(model, running=1, checkpoints=2) as scheduler:
        first = Request(text(300, 1), max_tokens=5, sampling=Sampling(1.0, seed=1), borders=[200])
        assert scheduler.submit(first).wait().tokens == alone[name](first)[0]
        again = Request(text(200, 1) + text(350, 2), max_tokens=5, sampling=Sampling(1.0, seed=2))
        answer = scheduler.submit(again).wait()
        assert answer.tokens == alone[name](again)[0]
        assert answer.stats.reused_tokens == 200


def test_who_finds_no_room_for_a_session_waits(folder: Folder, alone: dict[str, Alone]) -> None:
    """Even while all memory is somebody else's, who does not use the scheduler."""
    model = small(folder("qwen3_5_moe"), 1, 3)
    with Scheduler(model, running=2, checkpoints=1) as scheduler:
        others = moeflux.Model.session(model, CONTEXT)
        answer = scheduler.submit(ask(1, 300))
        assert scheduler.submit(Request(text(20), deadline=0.2)).wait().finish == "timeout"
        assert answer.finish is None and answer.waited_seconds is None
        others.close()
        assert (answer.wait().tokens, answer.finish) == alone["qwen3_5_moe"](ask(1, 300))


def test_who_finds_no_room_for_rows_waits(folder: Folder, alone: dict[str, Alone]) -> None:
    model = small(folder("qwen3_moe"), 2, 3)
    others = moeflux.Model.session(model, CONTEXT)
    others.prefill(text(600))
    with Scheduler(model, running=2, checkpoints=1) as scheduler:
        answer = scheduler.submit(ask(1, 300))
        until(lambda: answer.put_aside)
        assert not answer.tokens
        others.close()
        assert (answer.wait().tokens, answer.finish) == alone["qwen3_moe"](ask(1, 300))


@settings(
    max_examples=12,
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(NAMES),
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from((30, 200, 250, 400)), st.integers(1, 40), st.integers(0, 1)),
        min_size=1,
        max_size=7,
    ),
    st.integers(2, 5),
    st.integers(3, 5),
    st.sampled_from((16, 64)),
)
def test_whatever_gives_way_no_answer_changes(
    folder: Folder,
    alone: dict[str, Alone],
    name: str,
    asked: list[tuple[int, int, int, int]],
    sessions: int,
    blocks: int,
    rows: int,
) -> None:
    model = small(folder(name), sessions, blocks)
    with Scheduler(model, running=4, rows=rows, prompt_rows=64, checkpoints=2) as scheduler:
        requests = [ask(seed, prompt, count) for seed, prompt, count, _ in asked]
        answers = [
            scheduler.submit(moeflux.serving.Request(**{**vars(request), "priority": priority}))
            for request, (*_, priority) in zip(requests, asked, strict=True)
        ]
        for request, answer in zip(requests, answers, strict=True):
            assert (answer.wait().tokens, answer.finish) == alone[name](request)
        assert scheduler.stats.failed == 0
    assert (model._engine.sessions, model._engine.memory.sessions) == (0, 0)
