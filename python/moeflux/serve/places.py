"""Where conversations have been: hashes of what a request begins with, at the borders of its messages.

They are made of the request alone, so whoever sends requests to several servers needs neither the model nor its
template. Two requests with the same hash begin with the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from moeflux.serve.prompt import without_billing

__all__ = ["ALONE", "Place", "answer_place", "places_of"]

Place = tuple[str, int]
"""A hash, and how many characters lie before it."""

ALONE = 1 << 50
"""Characters of a place that is in one process alone and nowhere else."""
BLOCK = 1024
"""Characters of a text, and a quarter of that in tokens, from border to border."""
MOST = 4096
HEADS = ("tools", "system", "instructions")
UNSAID = "cache_control"
"""A member of messages that moves from turn to turn, and that no model reads."""


def places_of(path: str, body: Mapping[str, Any]) -> tuple[Place, ...]:
    """From the first to the deepest. None where the body is not what the path takes."""
    chain, count, found = hashlib.blake2b(path.encode(), digest_size=16), 0, list[Place]()
    if isinstance(before := body.get("previous_response_id"), str):
        return (answer_place(before),)
    for piece, size in _pieces(body):
        chain.update(len(piece).to_bytes(8, "little") + piece)
        count += size
        found.append((chain.hexdigest(), count))
        if len(found) == MOST:
            break
    return tuple(found)


def answer_place(id: str) -> Place:
    """Where the answer of that id is remembered: with who gave it."""
    return hashlib.blake2b(b"answer\0" + id.encode("utf-8", "replace"), digest_size=16).hexdigest(), ALONE


def _pieces(body: Mapping[str, Any]) -> Iterator[tuple[bytes, int]]:
    head = {name: body[name] for name in HEADS if body.get(name)}
    if head:
        yield _piece(head)
    said = body.get("messages", body.get("input"))
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    if isinstance(said, list):
        for message in said:
            yield _piece(message)
        return
    prompt, step = body.get("prompt"), BLOCK
    if isinstance(prompt, list):
        step = BLOCK // 4
    if isinstance(prompt, str | list):
        for begin in range(0, len(prompt), step):
            piece = _piece(prompt[begin : begin + step])
            yield piece if isinstance(prompt, str) else (piece[0], 4 * len(prompt[begin : begin + step]))


def _piece(value: Any) -> tuple[bytes, int]:
    text = json.dumps(_said(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode(), len(text)


def _said(value: Any) -> Any:
    """Without what no model reads, and a list of one text as that text."""
    if isinstance(value, Mapping):
        said = {name: _said(each) for name, each in value.items() if name != UNSAID}
        return said["text"] if isinstance(said.get("text"), str) and set(said) <= {"type", "text"} else said
    if isinstance(value, list):
        parts = [_said(each) for each in value]
        return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts
    return without_billing(value) if isinstance(value, str) else value
