"""Lines of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["DONE", "around", "comment", "data", "event", "json_text"]

DONE = "data: [DONE]\n\n"


json_text: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def data(value: Any) -> str:
    return f"data: {json_text(value)}\n\n"


def event(value: dict[str, Any]) -> str:
    """An event with the name that its `type` is."""
    return f"event: {value['type']}\n{data(value)}"


def around(told: str) -> tuple[str, str]:
    """What stands before and after the last empty text of an event. To put others there, in JSON, takes a tenth of the
    time that each event of theirs would take."""
    before, _, after = told.rpartition('""')
    return before, after


def comment(text: str) -> str:
    """What clients skip."""
    return f": {text}\n\n"
