"""OpenAI's completions: a text, or tokens, that the model goes on with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from moeflux.serve.chat_completions import OWN, usage_body
from moeflux.serve.events import Event, Text
from moeflux.serve.fields import LIMITS, Fields, Limits, Table
from moeflux.serve.request import Ask, Ending, Result, TokenLogprob, Usage, bias_of, sampling_of
from moeflux.serve.sse import DONE, around, comment, data, json_text

__all__ = ["FIELDS", "CompletionStream", "read", "whole"]

DEFAULT_TOKENS = 16  # that the interface's own specification names

FIELDS = Table(
    used={
        "model": "",
        "prompt": "a text, or the numbers of tokens",
        "stream": "",
        "stream_options": "`include_usage`",
        "max_tokens": f"{DEFAULT_TOKENS} without it",
        "temperature": "without it, what the model's own file says",
        "top_p": "",
        "n": "",
        "stop": "",
        "seed": "",
        "presence_penalty": "",
        "frequency_penalty": "",
        "logit_bias": "-100 forbids a token",
        "logprobs": "how many alternatives",
        **{name: note for name, note in OWN.items() if name != "chat_template_kwargs"},
    },
    ignored={"user": "requests are told apart by their key", "cache_prompt": "always on"},
    refused={
        "best_of": "expected none, or 1: ask for n answers and choose",
        "echo": "expected false: the prompt is not repeated",
        "suffix": "expected none, for models here fill no gaps",
    },
)


def read(body: dict[str, Any], limits: Limits = LIMITS) -> Ask:
    if body.get("best_of") == 1:
        body = {name: value for name, value in body.items() if name != "best_of"}
    FIELDS.check(body)
    values = Fields(body, limits=limits)
    return Ask(
        model=values.text("model"),
        prompt=_prompt(values),
        sampling={**sampling_of(values), **({"logit_bias": bias_of(values)} if "logit_bias" in values else {})},
        max_tokens=values.whole("max_tokens", 1) or DEFAULT_TOKENS,
        stop=values.stops("stop"),
        logprobs=values.whole("logprobs", 0, limits.logprobs),
        answers=values.whole("n", 1, limits.answers) or 1,
        stream=values.flag("stream"),
        stream_usage=values.inner("stream_options").flag("include_usage"),
        ignore_end=values.flag("ignore_eos"),
    )


def _prompt(values: Fields) -> str | list[int]:
    prompt = values.need("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    tokens = isinstance(prompt, list) and all(type(each) is int and 0 <= each < 1 << 31 for each in prompt)
    if not tokens or not prompt:
        raise values.wrong("prompt", "one text that is not empty, or one list of tokens")
    return list(prompt)


def whole(ask: Ask, id: str, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": result.said.text,
            "logprobs": None if ask.logprobs is None else _logprobs(result.logprobs),
            "finish_reason": _finish(result.ending),
        }
        for index, result in enumerate(results)
    ]
    return {**_head(ask, id), "choices": choices, "usage": usage_body(usage)}


def _finish(ending: Ending) -> str:
    return "length" if ending.cut else "stop"


def _head(ask: Ask, id: str) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": int(time.time()), "model": ask.model}


def _logprobs(tokens: Sequence[TokenLogprob], start: int = 0) -> dict[str, Any]:
    offsets = []
    for each in tokens:
        offsets.append(start)
        start += len(each.text)
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [{text: logprob for text, _, logprob in each.top} for each in tokens],
        "text_offset": offsets,
    }


class CompletionStream:
    def __init__(self, ask: Ask, id: str) -> None:
        self._ask = ask
        self._head = _head(ask, id)
        self._said = [0] * ask.answers  # characters of tokens
        self._around = [around(self._chunk(index, "", None, None)) for index in range(ask.answers)]

    def begin(self, prompt_tokens: int) -> str:
        return ""

    def add(self, index: int, events: Sequence[Event], logprobs: Sequence[TokenLogprob] = ()) -> str:
        text = "".join(event.text for event in events if isinstance(event, Text))
        if not logprobs:
            before, after = self._around[index]
            return f"{before}{json_text(text)}{after}" if text else ""
        told = _logprobs(logprobs, self._said[index])
        self._said[index] += sum(len(each.text) for each in logprobs)
        return self._chunk(index, text, told, None)

    def end(self, index: int, ending: Ending) -> str:
        return self._chunk(index, "", None, _finish(ending))

    def close(self, usage: Usage) -> str:
        last = data({**self._head, "choices": [], "usage": usage_body(usage)})
        return (last if self._ask.stream_usage else "") + DONE

    def ping(self, read: int, prompt_tokens: int) -> str:
        return comment(f"prompt {read} of {prompt_tokens} tokens")

    def error(self, body: dict[str, Any]) -> str:
        return data(body)

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> str:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return data({**self._head, "choices": [choice]})
