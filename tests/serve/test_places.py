"""Places of conversations: what begins with the same text has them in common."""

from __future__ import annotations

from typing import Any

import pytest

from moeflux.serve.places import ALONE, BLOCK, answer_place, places_of

CHAT, MESSAGES, RESPONSES, TEXT = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


SAID = {"role": "assistant", "content": "Hello!"}


def test_a_second_turn_has_the_places_of_the_first() -> None:
    first = places_of(CHAT, {"messages": [{"role": "system", "content": "Be kind."}, user("Hi")], "temperature": 1})
    second = places_of(CHAT, {"messages": [{"role": "system", "content": "Be kind."}, user("Hi"), SAID, user("So?")]})
    assert len(first) == 2 and second[:2] == first and len(second) == 4
    assert [count for _, count in second] == sorted({count for _, count in second})
    other = places_of(CHAT, {"messages": [{"role": "system", "content": "Be kind."}, user("Ho"), SAID, user("So?")]})
    assert other[0] == first[0] and not {*other[1:]} & {*second[1:]}


def test_tools_and_instructions_come_first() -> None:
    tool = {"name": "look", "input_schema": {}}
    with_tool = places_of(MESSAGES, {"system": "Be kind.", "tools": [tool], "messages": [user("Hi")]})
    without = places_of(MESSAGES, {"system": "Be kind.", "messages": [user("Hi")]})
    assert len(with_tool) == len(without) == 2 and not {*with_tool} & {*without}
    assert places_of(RESPONSES, {"instructions": "Be kind.", "input": "Hi"}) == places_of(
        RESPONSES, {"instructions": "Be kind.", "input": [user([{"type": "input_text", "text": "Hi"}])]}
    )


def test_what_moves_from_turn_to_turn_changes_no_place() -> None:
    marked = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    assert places_of(MESSAGES, {"messages": [user(marked)]}) == places_of(MESSAGES, {"messages": [user("Hi")]})
    billed = "x-anthropic-billing-header: cch=1\nBe kind."
    assert places_of(MESSAGES, {"system": billed, "messages": []}) == places_of(MESSAGES, {"system": "Be kind."})


@pytest.mark.parametrize("make", [lambda count: "a" * count, lambda count: [7] * (count // 4)])
def test_a_text_has_a_place_for_each_block(make: Any) -> None:
    first, longer = (places_of(TEXT, {"prompt": make(count)}) for count in (3 * BLOCK, 3 * BLOCK + 400))
    assert len(first) == 3 and longer[:3] == first and len(longer) == 4


def test_an_answer_is_where_it_was_made() -> None:
    assert places_of(RESPONSES, {"previous_response_id": "resp_1", "input": "Hi"}) == (answer_place("resp_1"),)
    assert answer_place("resp_1") != answer_place("resp_2") and answer_place("resp_1")[1] == ALONE


@pytest.mark.parametrize("body", [{}, {"messages": 3}, {"prompt": None}, {"input": {}}, {"previous_response_id": 3}])
def test_what_is_no_request_has_none(body: dict[str, Any]) -> None:
    assert places_of(CHAT, body) == ()


def test_no_path_has_the_places_of_another() -> None:
    assert places_of(CHAT, {"messages": [user("Hi")]}) != places_of(MESSAGES, {"messages": [user("Hi")]})
