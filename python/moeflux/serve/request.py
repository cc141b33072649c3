"""What all interfaces have in common: a request, understood, and what its answer needs to be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moeflux.serve.events import Said
from moeflux.serve.fields import Fields, RequestError

__all__ = [
    "Ask",
    "Ending",
    "Form",
    "Result",
    "TokenLogprob",
    "Tool",
    "Usage",
    "bias_of",
    "sampling_of",
    "texts_of",
]

Message = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema
    strict: bool = False
    text: bool = False  # its one argument, `input`, is a text, and the client is given that alone

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Form:
    """What the answer must be: JSON, maybe of a schema."""

    schema: Mapping[str, Any] | None = None
    strict: bool = True  # what cannot be kept to is refused
    where: str = field(default="response_format", compare=False)  # the field that asks for it


@dataclass(frozen=True)
class Ask:
    """A request of any interface."""

    model: str
    messages: Sequence[Message] = ()  # as chat templates know them; `arguments` of calls are text
    prompt: str | Sequence[int] | None = None  # instead of messages
    prefill: str = ""  # what the answer begins with
    tools: tuple[Tool, ...] = ()
    choice: str = "auto"  # or "none", "required", "tool:NAME"
    parallel: bool = True  # more than one call in an answer
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of Sampling that the client gave
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    form: Form | None = None
    logprobs: int | None = None  # alternatives to give for each token; None: not even its own
    answers: int = 1
    stream: bool = False
    stream_usage: bool = False  # a last chunk with the usage
    thinking: bool | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    optional: Mapping[str, Any] = field(default_factory=dict)  # the same, given only where the template has them
    ignore_end: bool = False
    deadline: float | None = None  # seconds
    echo: Mapping[str, Any] = field(default_factory=dict)  # what the interface repeats in its answer


@dataclass(frozen=True)
class TokenLogprob:
    text: str
    data: bytes  # which may be half a character
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    prompt: int
    cached: int = 0  # of the prompt, not evaluated again
    answer: int = 0
    thought: int = 0  # of the answer

    def __add__(self, other: Usage) -> Usage:
        """Of several answers to one prompt."""
        return Usage(self.prompt, self.cached, self.answer + other.answer, self.thought + other.thought)


@dataclass(frozen=True)
class Ending:
    """Why an answer ended."""

    finish: Literal["end", "stop", "length", "context", "timeout", "cancelled"]
    stop_string: str | None = None

    @property
    def cut(self) -> bool:
        """Whether something else than the model ended it."""
        return self.finish not in ("end", "stop")


@dataclass
class Result:
    """One whole answer."""

    said: Said
    ending: Ending
    logprobs: list[TokenLogprob] = field(default_factory=list)


def sampling_of(values: Fields) -> dict[str, Any]:
    """The fields of Sampling under the names that interfaces share."""
    given = {
        "temperature": values.number("temperature", 0, 100),
        "top_p": values.number("top_p", 0, 1),
        "top_k": values.whole("top_k", -1),
        "min_p": values.number("min_p", 0, 1),
        "presence_penalty": values.number("presence_penalty", -2, 2),
        "frequency_penalty": values.number("frequency_penalty", -2, 2),
        "repetition_penalty": values.number("repetition_penalty", 0.01, 100),
        "seed": values.whole("seed", -(1 << 63), (1 << 64) - 1),
    }
    sampling = {name: value for name, value in given.items() if value is not None}
    if sampling.get("top_p") == 0:  # the likeliest alone, as the smallest number above it says
        sampling["top_p"] = 1e-9
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    if "seed" in sampling:
        sampling["seed"] %= 1 << 64
    return sampling


def bias_of(values: Fields) -> dict[int, float]:
    bias = values.inner("logit_bias")
    if len(bias) > values.limits.bias:
        raise RequestError(
            f"logit_bias: expected at most {values.limits.bias} entries, found {len(bias)}", "logit_bias"
        )
    found: dict[int, float] = {}
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise bias.wrong(token, "the number of a token as its name", token)
        value = bias.number(token, -100, 100)
        assert value is not None
        found[int(token)] = float("-inf") if value == -100 else value
    return found


def texts_of(values: Fields, name: str, kinds: Sequence[str] = ("text",)) -> str:
    """Content that is text, or a list of parts of which each is."""
    content = values.get(name, "")
    if isinstance(content, str):
        return content
    parts = values.objects(name, values.limits.parts)
    texts = []
    for part in parts:
        kind = part.text("type", "text")
        if kind not in kinds:
            path = part.path("type")
            raise RequestError(f"{path}: expected {' or '.join(kinds)}, found {kind!r:.40}", path)
        texts.append(part.text("text" if "text" in part else "refusal"))
    return "\n".join(texts)
