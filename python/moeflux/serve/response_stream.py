"""OpenAI's responses: what is answered, whole and as events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from moeflux.serve.chat_completions import logprobs_body
from moeflux.serve.events import Arguments, CallBegin, CallEnd, Event, Text, Thought
from moeflux.serve.request import Ask, Ending, Result, TokenLogprob, Usage
from moeflux.serve.responses import sealed
from moeflux.serve.sse import comment, event

__all__ = ["ResponseStream", "whole"]

Item = dict[str, Any]


def whole(ask: Ask, id: str, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
    """The same items as the events make, in one body."""
    (result,) = results
    stream = ResponseStream(ask, id)
    said = result.said
    events: list[Event] = [Thought(said.thought)] if said.thought else []
    events += [Text(said.text)] if said.text else []
    for call in said.calls:
        events += [CallBegin(call.id, call.name), Arguments(call.arguments), CallEnd(call.complete)]
    stream.add(0, events, result.logprobs)
    stream.end(0, result.ending)
    return stream.body(usage)


class ResponseStream:
    """Server-sent events in the order that clients expect: each item is added, grows, and is done."""

    def __init__(self, ask: Ask, id: str) -> None:
        self._ask = ask
        self._id = id
        self._created = time.time()
        self._number = -1  # of the last event
        self._items: list[Item] = []  # that are done
        self._item: Item | None = None  # that is open
        self._text = ""  # of the open item
        self._logprobs: list[dict[str, Any]] = []
        self._texts = {tool.name for tool in ask.tools if tool.text}
        self._ending = Ending("end")

    # ---- Whole responses ----------------------------------------------------------------------------------------

    def body(self, usage: Usage | None, status: str = "") -> dict[str, Any]:
        cut = self._ending.cut
        reason = {"reason": "max_output_tokens"} if cut and not status else None
        return {
            **self._ask.echo,
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if cut else "completed"),
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "model": self._ask.model,
            "output": self._items,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    # ---- Events -------------------------------------------------------------------------------------------------

    def begin(self, prompt_tokens: int) -> str:
        body = self.body(None, "in_progress")
        return self._tell("response.created", response=body) + self._tell("response.in_progress", response=body)

    def add(self, index: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob] = ()) -> str:
        told = logprobs_body(logprobs)["content"] if logprobs else []
        lines: list[str] = []
        for each in events:
            lines += self._event(each, told if isinstance(each, Text) else [])
            told = [] if isinstance(each, Text) else told
        return "".join(lines)

    def end(self, index: int, ending: Ending) -> str:
        self._ending = ending
        return "".join(self._close_item(complete=not ending.cut))

    def close(self, usage: Usage) -> str:
        body = self.body(usage)
        return self._tell(f"response.{body['status']}", response=body)

    def ping(self, read: int, prompt_tokens: int) -> str:
        return comment(f"prompt {read} of {prompt_tokens} tokens")

    def error(self, body: dict[str, Any]) -> str:
        failed = self.body(None, "failed")
        failed["error"] = {"code": "server_error", "message": body["error"]["message"]}
        return self._tell("response.failed", response=failed)

    def _tell(self, kind: str, **values: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **values})

    def _event(self, each: Event, logprobs: list[dict[str, Any]]) -> Iterator[str]:
        if isinstance(each, Text):
            if self._item is None or self._item["type"] != "message":
                yield from self._open_message()
            yield from self._grow("response.output_text.delta", each.text, content_index=0, logprobs=logprobs)
            self._logprobs += logprobs
        elif isinstance(each, Thought):
            if self._item is None or self._item["type"] != "reasoning":
                yield from self._open_reasoning()
            yield from self._grow("response.reasoning_text.delta", each.text, content_index=0)
        elif isinstance(each, CallBegin):
            yield from self._open_call(each)
        elif isinstance(each, Arguments):
            assert self._item is not None
            if self._item["type"] == "function_call":
                yield from self._grow("response.function_call_arguments.delta", each.text)
            else:
                self._text += each.text
        else:
            yield from self._close_item(each.complete)

    def _grow(self, kind: str, text: str, **values: Any) -> Iterator[str]:
        assert self._item is not None
        self._text += text
        yield self._tell(kind, **self._place, **values, delta=text)

    @property
    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._items)}

    # ---- Items --------------------------------------------------------------------------------------------------

    def _open(self, prefix: str, **values: Any) -> Iterator[str]:
        yield from self._close_item()
        self._item = {"id": f"{prefix}_{secrets.token_hex(12)}", **values}
        yield self._tell("response.output_item.added", output_index=len(self._items), item=self._item)

    def _open_message(self) -> Iterator[str]:
        yield from self._open("msg", type="message", role="assistant", status="in_progress", content=[])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._tell("response.content_part.added", **self._place, content_index=0, part=part)

    def _open_reasoning(self) -> Iterator[str]:
        yield from self._open("rs", type="reasoning", summary=[], content=[], status="in_progress")
        part = {"type": "reasoning_text", "text": ""}
        yield self._tell("response.content_part.added", **self._place, content_index=0, part=part)

    def _open_call(self, call: CallBegin) -> Iterator[str]:
        named = {"call_id": call.id, "name": call.name, "status": "in_progress"}
        if call.name in self._texts:
            yield from self._open("ctc", type="custom_tool_call", **named, input="")
        else:
            yield from self._open("fc", type="function_call", **named, arguments="")

    def _close_item(self, complete: bool = True) -> Iterator[str]:
        item = self._item
        if item is None:
            return
        yield from getattr(self, f"_close_{item['type']}")(item)
        if "status" in item:
            item["status"] = "completed" if complete else "incomplete"
        done = self._tell("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._item, self._text, self._logprobs = None, "", []
        yield done

    def _close_message(self, item: Item) -> Iterator[str]:
        part = {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}
        yield self._tell(
            "response.output_text.done", **self._place, content_index=0, text=self._text, logprobs=self._logprobs
        )
        yield self._tell("response.content_part.done", **self._place, content_index=0, part=part)
        item["content"] = [part]

    def _close_reasoning(self, item: Item) -> Iterator[str]:
        part = {"type": "reasoning_text", "text": self._text}
        yield self._tell("response.reasoning_text.done", **self._place, content_index=0, text=self._text)
        yield self._tell("response.content_part.done", **self._place, content_index=0, part=part)
        item["content"], item["encrypted_content"] = [part], sealed(self._text)

    def _close_function_call(self, item: Item) -> Iterator[str]:
        item["arguments"] = self._text
        yield self._tell(
            "response.function_call_arguments.done", **self._place, name=item["name"], arguments=self._text
        )

    def _close_custom_tool_call(self, item: Item) -> Iterator[str]:
        item["input"] = custom_input(self._text)
        yield self._tell("response.custom_tool_call_input.delta", **self._place, delta=item["input"])
        yield self._tell("response.custom_tool_call_input.done", **self._place, input=item["input"])


def custom_input(arguments: str) -> str:
    """The text that is the only argument of a custom tool; all that was said if it cannot be read."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.answer,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.answer,
    }
