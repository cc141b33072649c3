"""From a request to answers on their way: everything that is of one model, and of no interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from moeflux.serve.answer import Answer
from moeflux.serve.constrain import Constraint, Grammars
from moeflux.serve.errors import ContextError
from moeflux.serve.fields import LIMITS, Limits, RequestError
from moeflux.serve.grammars import grammar_of
from moeflux.serve.prompt import prompt_of
from moeflux.serve.protocols import Handle, Scheduler, ServedModel
from moeflux.serve.replay import Replay
from moeflux.serve.request import Ask, Message, Result
from moeflux.serve.responses import Stored
from moeflux.serve.tools.families import family_of
from moeflux.text.chat import ChatFormat, Prompt

__all__ = ["Begun", "Desk", "Prepared"]

UNWANTED = -1e4
"""Added to a logit: the token comes only where there is no other."""


@dataclass(frozen=True)
class Prepared:
    """A request whose tokens are known."""

    ask: Ask
    prompt: Prompt
    messages: Sequence[Message]  # with the thoughts that the client left out
    constraint: Constraint | None


@dataclass(frozen=True)
class Begun:
    """One answer on its way."""

    handle: Handle
    answer: Answer


class Desk:
    def __init__(self, model: ServedModel, scheduler: Scheduler, name: str, context: int, limits: Limits = LIMITS):
        self.model = model
        self.scheduler = scheduler
        self.name = name
        self.context = context  # tokens of a prompt and its answer
        self.limits = limits
        self.stored = Stored()
        self.tokenizer = model.tokenizer
        form = model.chat_format
        self._template = "" if form is None else form.text
        self.family = family_of(self._template)
        self._replay = None if form is None else Replay(form, model.end_tokens, self.family)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.model.end_tokens, self.model.variant.vocab_size)

    # ---- Before -------------------------------------------------------------------------------------------------

    def prepare(self, ask: Ask) -> Prepared:
        """Takes milliseconds, in a thread. RequestError for what cannot be answered, ContextError for what is too
        long."""
        messages = list(ask.messages)
        if ask.prompt is not None:
            prompt = Prompt("", self._tokens(ask.prompt), (), False)
        else:
            form = self._form()
            if not messages:
                raise RequestError("messages: expected at least one, found none", "messages")
            assert self._replay is not None
            messages = self._replay.with_thoughts(messages)
            prompt = prompt_of(replace(ask, messages=messages), form, self.family)
            prompt = self._replay.replayed(prompt, messages)
        if len(prompt.tokens) > self.context:
            raise ContextError(len(prompt.tokens), 0, self.context)
        return Prepared(ask, prompt, messages, self._constraint(ask, prompt.thinking))

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return [*self.tokenizer.prefix, *self.tokenizer.encode(prompt)]
        vocab = self.model.variant.vocab_size
        for token in prompt:
            if token >= vocab:
                raise RequestError(f"prompt: expected tokens 0 to {vocab - 1}, found {token}", "prompt")
        return list(prompt)

    def _form(self) -> ChatFormat:
        form = self.model.chat_format
        if form is None:
            raise RequestError("messages: expected a model with a chat template; this one takes prompts", "messages")
        return form

    def _constraint(self, ask: Ask, thinking: bool) -> Constraint | None:
        grammar = grammar_of(ask, self.family, thinking, self._template, self._added)
        if grammar is None:
            return None
        return self._grammars.compile(grammar, "tools" if ask.form is None else ask.form.where)

    def _added(self, token: str) -> int | None:
        return self.tokenizer.id_of(token) if token in self.tokenizer.added else None

    # ---- During -------------------------------------------------------------------------------------------------

    def begin(self, prepared: Prepared, tenant: str = "") -> list[Begun]:
        """Submits the request, once for each answer. All of them or none."""
        ask, begun = prepared.ask, list[Begun]()
        sampling = replace(self.model.default_sampling, **ask.sampling)
        if prepared.constraint is not None:  # where a form leaves nothing else, what is forbidden comes
            bias = {token: max(each, UNWANTED) for token, each in sampling.logit_bias.items()}
            sampling = replace(sampling, logit_bias=bias)
        try:
            for index in range(ask.answers):
                seed = None if sampling.seed is None else (sampling.seed + index) % (1 << 64)
                constraint = prepared.constraint if index == 0 or prepared.constraint is None else (
                    prepared.constraint.again()
                )  # fmt: skip
                handle = self.scheduler.submit(
                    prompt=prepared.prompt,
                    max_tokens=None if ask.max_tokens is None else max(ask.max_tokens, 1),
                    stop=ask.stop,
                    ignore_end=ask.ignore_end,
                    sampling=replace(sampling, seed=seed),
                    logprobs=ask.logprobs,
                    continues=ask.prompt is not None or bool(ask.prefill),
                    mask=constraint,
                    tenant=tenant,
                    deadline=ask.deadline,
                )
                answer = Answer(ask, len(prepared.prompt.tokens), prepared.prompt.thinking, self.family, self.tokenizer)
                begun.append(Begun(handle, answer))
        except BaseException:
            for each in begun:
                each.handle.cancel()
            raise
        return begun

    # ---- After --------------------------------------------------------------------------------------------------

    def keep(self, prepared: Prepared, id: str, results: Sequence[tuple[Answer, Result]]) -> None:
        """Remembers answers that the client has been told, so that they are known when they come back."""
        ask = prepared.ask
        if self._replay is None or ask.prompt is not None:
            return
        for answer, result in results:
            if result.ending.finish in ("end", "length", "context"):
                said = replace(result.said, text=ask.prefill + result.said.text)
                self._replay.keep(prepared.prompt.tokens, answer.tokens, said, ask.prefill)
        if ask.echo.get("store"):
            self.stored.keep(id, [*prepared.messages, _message_of(results[0][1])])


def _message_of(result: Result) -> Message:
    said = result.said
    message: Message = {"role": "assistant", "content": said.text}
    if said.thought:
        message["reasoning_content"] = said.thought
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.calls
        if call.complete
    ]
    return {**message, "tool_calls": calls} if calls else message
