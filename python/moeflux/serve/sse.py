"""Lines of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

__all__ = ["DONE", "comment", "data", "event", "json_text"]

DONE = "data: [DONE]\n\n"


json_text: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def data(value: Any) -> str:
    return f"data: {json_text(value)}\n\n"


def event(value: dict[str, Any]) -> str:
    """An event with the name that its `type` is."""
    return f"event: {value['type']}\n{data(value)}"


def comment(text: str) -> str:
    """What clients skip."""
    return f": {text}\n\n"
