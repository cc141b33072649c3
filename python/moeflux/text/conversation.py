"""Talking with a model: messages in, answers as they come, and a session that keeps what was said evaluated.

talk = model.chat(system="Be brief.")
for part in talk.ask("What is the capital of France?"):
    print(part.text, end="", flush=True)
print(talk.ask("And of Italy?").text)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeflux.errors import ArgumentError, FormatError, StateError
from moeflux.files import parse_json
from moeflux.runtime.snapshot import Snapshot
from moeflux.text.awaiting import Answer
from moeflux.text.channels import without_thoughts
from moeflux.text.chat import ChatFormat, Message, Prompt, check_messages, plain_value
from moeflux.text.generate import Finish, Generation, GenerationStats, Piece, begin
from moeflux.text.protocols import TextModel, TextSession
from moeflux.text.reuse import reach
from moeflux.text.tokenizer import shared_length

__all__ = ["Conversation", "Part", "Reply"]


@dataclass(frozen=True)
class Part:
    """A part of an answer, or of the thoughts before it. The text may be empty: then the part is only a token."""

    text: str
    thought: bool
    piece: Piece


class Reply(Answer[Part]):
    """An answer as it comes: an iterator of parts, once through. When it ends, however that is, the conversation has
    what was said; an answer of nothing leaves the conversation as it was before the question.

    To have the answer in one piece, ask for its `text`, or `wait`. `async for` works as in Generation.
    """

    def __init__(self, generation: Generation, prompt: Prompt, form: ChatFormat, done: Callable[[Reply], None]) -> None:
        self.generation = generation
        self.prompt = prompt
        self._split = form.split(prompt)
        self._marks = form.marks
        self._spelled = form.speech.marks.spelled
        self.begun = False
        self._said = {False: "", True: ""}  # text, thoughts
        self._done = done
        self._parts = self._run()

    @property
    def text(self) -> str:
        """The text of the answer so far. If nobody has begun to read the answer, this waits for all of it."""
        return self._so_far(False)

    @property
    def thoughts(self) -> str:
        """The thoughts before the answer, likewise."""
        return self._so_far(True)

    def _so_far(self, thought: bool) -> str:
        if not self.begun:
            self.wait()
        return self._said[thought]

    @property
    def finish(self) -> Finish | None:
        """Why the answer ended; None while it goes on."""
        return self.generation.finish

    @property
    def stats(self) -> GenerationStats:
        """What the answer has cost so far."""
        return self.generation.stats

    def __next__(self) -> Part:
        self.begun = True
        return next(self._parts)

    def __repr__(self) -> str:
        finish = "" if self.finish is None else f", finish={self.finish!r}"
        return f"Reply({len(self.generation.tokens)} tokens{finish}, text={self._said[False][-60:]!r})"

    def cancel(self) -> None:
        """Cancels as Generation.cancel does. The conversation keeps what has been said."""
        self.generation.cancel()

    def close(self) -> None:
        """Ends it here, as `cancel` does."""
        self.cancel()
        for _ in self:
            pass

    def _run(self) -> Iterator[Part]:
        split = self._split
        try:
            for piece in self.generation:
                mark = "" if piece.token is None else self._marks.get(piece.token, "")
                parts = list(split.add(piece.text + mark))
                if self.generation.finish is not None:
                    parts += split.finish()
                for thought, text in parts or [(False, "")]:
                    yield Part(self._keep(thought, text), thought, piece)
        finally:
            for thought, text in split.finish():
                self._keep(thought, text)
            self._done(self)

    def _keep(self, thought: bool, text: str) -> str:
        """A call between marks is text here."""
        text = self._spelled(text)
        self._said[thought] += text
        return text


class Conversation:
    """Messages, and a session that holds as much of them as it can. One caller at a time.

    Before anything else is said or asked, an answer that nobody has begun to read is finished in full. An answer that
    somebody has begun to read ends where it is.

    `close`, or the end of its `with`, closes the session, unless the session was given: then it is its owner's.
    """

    def __init__(
        self,
        model: TextModel,
        session: TextSession | None = None,
        *,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        thinking: bool | None = None,
        **variables: Any,
    ) -> None:
        if model.chat_format is None:
            raise StateError(f"{model.path}: expected a model with a chat template, found none: it only continues text")
        self._form = model.chat_format
        self._form.check_variables(variables)
        self._owns_session = session is None
        self.session = model.session() if session is None else session
        self.messages: list[Message] = []
        self.tools = tools
        self.thinking = thinking
        self.variables = variables
        self._open: Reply | None = None
        if system is not None:
            self.set_system(system)

    # ---- Being open ---------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.session.closed

    def close(self) -> None:
        """Ends an open answer where it is and gives the session's memory back. What was said is still in `messages`;
        whatever evaluates afterwards is a StateError."""
        if not self.session.closed:
            self._drop()
        if self._owns_session:
            self.session.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- Saying -------------------------------------------------------------------------------------------------

    def ask(self, content: Any, **options: Any) -> Reply:
        """Says something as the user. `options` are those of `Session.generate`."""
        self._close()
        self.messages.append({"role": "user", "content": content})
        try:
            return self._answer(options, lambda: self.messages.pop())
        except BaseException:
            self.messages.pop()
            raise

    def answer(self, **options: Any) -> Reply:
        """An answer to the messages as they are."""
        self._close()
        return self._answer(options, lambda: None)

    def retry(self, **options: Any) -> Reply:
        """Gives another answer in place of the last one."""
        self._close()
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise StateError("retry: expected an answer that can be given again, found none")
        last = self.messages.pop()
        try:
            return self._answer(options, lambda: self.messages.append(last))
        except BaseException:
            self.messages.append(last)
            raise

    def undo(self) -> None:
        """Takes back the last question and its answer."""
        asked = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise StateError("undo: expected a question to take back, found none")
        self._drop()  # with the question, where there is no answer yet
        del self.messages[asked[-1] :]

    def clear(self) -> None:
        """Forgets all but the instructions."""
        self._drop()
        del self.messages[1 if self.system is not None else 0 :]

    @property
    def system(self) -> str | None:
        """The instructions that precede the conversation."""
        first = self.messages[0] if self.messages else None
        return first.get("content") if first is not None and first["role"] == "system" else None

    @property
    def thinking(self) -> bool | None:
        """Whether the model should think before it answers. None leaves it to the template."""
        return self._thinking

    @thinking.setter
    def thinking(self, wanted: bool | None) -> None:
        self._form.check_thinking(wanted)
        self._thinking = wanted

    @property
    def reasoning_effort(self) -> str | None:
        """How long the model should think, in a word of its template. None leaves it to the template."""
        effort: str | None = self.variables.get("reasoning_effort")
        return effort

    @reasoning_effort.setter
    def reasoning_effort(self, wanted: str | None) -> None:
        if wanted is not None and not self._form.knows("reasoning_effort"):
            raise ArgumentError("reasoning_effort: expected a template that has it, found one without")
        rest = {name: value for name, value in self.variables.items() if name != "reasoning_effort"}
        self.variables = rest if wanted is None else {**rest, "reasoning_effort": wanted}

    def set_system(self, text: str | None) -> None:
        self._close()
        rest = self.messages[1 if self.system is not None else 0 :]
        self.messages = ([{"role": "system", "content": text}] if text else []) + rest

    def prompt(self, messages: Sequence[Message] | None = None) -> Prompt:
        """The prompt that the model will read."""
        said = self.messages if messages is None else messages
        return self._form.encode(
            without_thoughts(said) if self._form.has_channels else said,
            tools=self.tools,
            enable_thinking=self.thinking,
            **self.variables,
        )

    def _answer(self, options: dict[str, Any], take_back: Callable[[], object]) -> Reply:
        def done(reply: Reply) -> None:
            self._open = None
            if not reply.text and not reply.thoughts:
                take_back()
                return
            thoughts = {"reasoning_content": reply.thoughts} if reply.thoughts else {}
            self.messages.append({"role": "assistant", "content": reply.text, **thoughts})

        prompt = self.prompt()
        asked: dict[str, Any] = {"continues": False, **options}
        self._open = Reply(begin(self.session, prompt, **asked), prompt, self._form, done)
        return self._open

    def _close(self) -> None:
        """Ends an open answer before something else is said. If nobody has begun to read it, it is finished in full."""
        if self._open is not None and not self._open.begun:
            self._open.wait()
        self._drop()

    def _drop(self) -> None:
        """Ends an open answer where it is."""
        if self._open is not None:
            self._open.close()

    def __repr__(self) -> str:
        return f"Conversation(messages={len(self.messages)}, session={self.session!r})"

    # ---- Files --------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, on_progress: Callable[[int, int], object] | None = None) -> None:
        """Saves what was said and the session's state, so that going on needs no evaluation of it."""
        self._close()
        self._settle(on_progress)
        said = {"messages": self.messages, "tools": self.tools, "thinking": self.thinking, "variables": self.variables}
        replace(self.session.snapshot(), conversation=json.dumps(plain_value(said, "conversation", -3))).save(path)

    def load(self, path: str | Path) -> None:
        """Continues where `save` was called. A file that does not fit is refused before anything changes."""
        self._drop()
        snapshot = Snapshot.load(path, self.session.model.variant, self.session.max_context)
        said = _parse(snapshot.conversation, str(path))
        self._form.check_thinking(said["thinking"])
        self.session.restore(snapshot)
        self.messages, self.tools = said["messages"], said["tools"]
        self.thinking, self.variables = said["thinking"], said["variables"]

    def _settle(self, on_progress: Callable[[int, int], object] | None) -> None:
        """Brings the session to the last position that every later prompt shares: templates close the last answer, and
        some take its thoughts out. The next prompt would have to evaluate the same tokens."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return
        one, other = (
            self.prompt([*self.messages, {"role": "user", "content": text}]).tokens for text in ("one", "two")
        )
        certain = one[: shared_length(one, other)]
        if certain and len(certain) <= self.session.max_context and self.session.tokens != certain:
            reach(self.session, certain, on_progress=on_progress)


def _parse(text: str, where: str) -> dict[str, Any]:
    if not text:
        raise FormatError(f"{where}: expected a saved conversation, found a session without one")
    said = parse_json(text, f"{where}: conversation")
    try:
        if not isinstance(said, dict):
            raise ValueError(f"found {type(said).__name__}")
        messages = check_messages(said["messages"]) if said["messages"] else []
        variables = said["variables"]
        if not isinstance(variables, dict) or said["thinking"] not in (None, True, False):
            raise ValueError("found other variables")
        return {"messages": messages, "tools": said["tools"], "thinking": said["thinking"], "variables": variables}
    except (ValueError, KeyError) as error:
        raise FormatError(f"{where}: conversation: expected messages and variables, {error}") from error
