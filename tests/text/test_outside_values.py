"""Numbers of thousands of digits, and values without end, wherever a call takes them: errors of moeflux's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moeflux
from moeflux.conversion.synth import synth
from moeflux.errors import Error, found
from moeflux.measure.evaluate import evaluate
from moeflux.models import builtin
from moeflux.text.conversation import Conversation

HUGE = 10**5000  # Python does not even write it
MESSAGE = {"role": "user", "content": "x"}


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.fixture(scope="module")
def model() -> moeflux.Model:
    return moeflux.load(builtin.path(), threads=1)


def generated(**options: Any) -> Callable[[moeflux.Model], Any]:
    return lambda model: next(model.session().generate("a", **options))


def loaded(**options: Any) -> Callable[[moeflux.Model], Any]:
    return lambda model: moeflux.load(builtin.path(), **options)


def encoded(message: dict[str, Any] = MESSAGE, **options: Any) -> Callable[[moeflux.Model], Any]:
    return lambda model: model.chat_format.encode([message], **options)  # type: ignore[union-attr]


CALLS: dict[str, Callable[[moeflux.Model], Any]] = {
    **{
        f"generate {name} {sign:+}": generated(**{name: sign * HUGE})
        for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "seed", "logprobs")
        for sign in (1, -1)
    },
    "generate max_tokens": generated(max_tokens=-HUGE),
    "generate not a number": generated(temperature=math.nan),
    "generate logit_bias token": generated(logit_bias={HUGE: 1}),
    "generate logit_bias": generated(logit_bias={1: HUGE}),
    "prompt": lambda model: model.session().generate([HUGE]),
    "prefill": lambda model: model.session().prefill([HUGE]),
    "step": lambda model: model.session().step(HUGE),
    "rewind": lambda model: model.session().rewind(HUGE),
    "checkpoints": lambda model: model.session().set_max_checkpoints(HUGE),
    "session": lambda model: model.session(max_context=HUGE),
    "decode": lambda model: model.tokenizer.decode([HUGE]),
    "decode below": lambda model: model.tokenizer.decode([-1]),
    "evaluate": lambda model: evaluate(model, [1, 2, 3], window=-HUGE),
    **{
        f"load {name}": loaded(**{name: HUGE})
        for name in (
            "context",
            "memory",
            "sessions",
            "threads",
            "readers",
            "expert_slots",
            "chunk",
            "experts_per_token",
        )
    },
    "load memory as text": loaded(memory="9" * 5000),
    "load memory as a size": loaded(memory="9" * 5000 + "TiB"),
    "message": encoded({**MESSAGE, "n": HUGE}),
    "message not a number": encoded({**MESSAGE, "n": math.nan}),
    "message without end": encoded({**MESSAGE, "content": endless()}),
    "message of half a character": encoded({**MESSAGE, "n": "\udcff"}),
    "variable without end": encoded(x=endless()),
    "tools without end": encoded(tools=[{"a": endless()}]),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_an_error_of_ours(name: str, model: moeflux.Model) -> None:
    with pytest.raises(Error) as caught:
        CALLS[name](model)
    assert len(str(caught.value)) < 400


def test_a_conversation_that_could_not_be_read_again_is_not_saved(model: moeflux.Model, tmp_path: Path) -> None:
    for value in (HUGE, endless(), math.inf):
        talk = Conversation(model)
        talk.messages.append({**MESSAGE, "n": value})
        with pytest.raises(Error, match="conversation: expected"):
            talk.save(tmp_path / "talk")
    assert list(tmp_path.iterdir()) == []


def test_what_was_nested_comes_back(model: moeflux.Model, tmp_path: Path) -> None:
    """As deep as a message may be."""
    value: Any = "core"
    for _ in range(31):
        value = [value]
    talk = Conversation(model)
    talk.messages.append({**MESSAGE, "n": value})
    talk.save(tmp_path / "talk")
    again = Conversation(model)
    again.load(tmp_path / "talk")
    assert again.messages == talk.messages


def test_a_seed_beyond_all_bounds(model: moeflux.Model, tmp_path: Path) -> None:
    with pytest.raises(Error, match="seed: expected a whole number of 64 bits, found a number too long"):
        synth(tmp_path / "store", model.variant, seed=HUGE)


def test_values_in_messages_are_short() -> None:
    assert found("a" * 100) == "'" + "a" * 39
    assert found(-HUGE) == "a number too long to be written"
