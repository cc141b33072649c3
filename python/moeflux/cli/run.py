"""One prompt, one answer, on stdout: what `moeflux run` does."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moeflux import files
from moeflux.errors import ArgumentError
from moeflux.progress import Counting, for_terminal
from moeflux.text.generate import Generation, Piece
from moeflux.text.protocols import TextModel

if TYPE_CHECKING:
    from moeflux.model import Model

__all__ = ["Options", "Printer", "cancelled_by_ctrl_c", "read_prompt", "run"]


@dataclass(frozen=True)
class Options:
    raw: bool = False  # go on with the text, without a template
    system: str | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None
    as_json: bool = False
    stats: bool = False


def read_prompt(text: str | None, file: str | None) -> str:
    """The prompt, from the command line, a file, or stdin. A line end at the very end belongs to the file."""
    if text is None:
        text = _read(file).removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise ArgumentError("prompt: expected some text, found none")
    return text


def _read(file: str | None) -> str:
    where = "stdin" if file in (None, "-") else str(file)
    if where != "stdin":
        return files.read_text(where)
    if sys.stdin.isatty():
        print("the prompt, and Ctrl-D at its end:", file=sys.stderr)
    return files.stdin_text()


def run(model: Model, prompt: str, options: Options, generation: dict[str, Any]) -> int:
    """Returns the exit status. `generation` goes to `Session.generate`."""
    printer = JsonPrinter() if options.as_json else Printer()
    with Counting(for_terminal(passing=True), "reading the prompt", "tokens") as counting:
        answer, parts = _begin(model, prompt, options, {**generation, "on_progress": counting})
        with cancelled_by_ctrl_c(answer):
            for text, thought, piece in parts:
                printer.show(text, thought, piece)
    printer.end(answer, model)
    if options.stats:
        print(answer.stats, file=sys.stderr)
    if answer.finish in ("length", "context") and not options.as_json:
        limit = "--max-tokens allows no more" if answer.finish == "length" else "the context is full"
        print(f"moeflux run: stopped after {len(answer.tokens)} tokens: {limit}", file=sys.stderr)
    return 130 if answer.finish == "cancelled" else 0


def _begin(
    model: Model, prompt: str, options: Options, generation: dict[str, Any]
) -> tuple[Generation, Iterator[tuple[str, bool, Piece]]]:
    if options.raw or model.chat_format is None:
        for flag in ("system", "thinking", "reasoning_effort"):
            if getattr(options, flag) is not None:
                raise ArgumentError(f"--{flag.replace('_', '-')}: expected a model with a chat template and no --raw")
        answer = model.session().generate(prompt, **generation)
        return answer, ((piece.text, False, piece) for piece in answer)
    talk = model.chat(system=options.system, thinking=options.thinking)
    if options.reasoning_effort is not None:
        talk.reasoning_effort = options.reasoning_effort
    reply = talk.ask(prompt, **generation)
    return reply.generation, ((part.text, part.thought, part.piece) for part in reply)


@contextmanager
def cancelled_by_ctrl_c(answer: Generation) -> Generator[None, None, None]:
    """Inside the `with`, the first Ctrl-C ends the answer cleanly, and a second one is a KeyboardInterrupt."""
    pressed = False

    def stop(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        answer.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Printer:
    """Prints answers to stdout and thoughts to stderr, where they are dim on a terminal."""

    def __init__(self) -> None:
        self._thinking = False
        self._last = "\n"  # the last character of the answer
        dim = sys.stderr.isatty()
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if dim else ("", "")

    def show(self, text: str, thought: bool, piece: Piece) -> None:
        if not text:
            return
        if thought:
            self._thinking = True
            print(f"{self._dim}{text}{self._plain}", end="", file=sys.stderr, flush=True)
            return
        self._end_thought()
        self._last = text[-1]
        print(text, end="", flush=True)

    def _end_thought(self) -> None:
        if self._thinking:
            self._thinking = False
            print("\n", file=sys.stderr, flush=True)

    def end(self, answer: Generation, model: TextModel) -> None:
        self._end_thought()
        if self._last != "\n":
            print(flush=True)


class JsonPrinter(Printer):
    """Prints one line per token as it comes, and one with everything at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._texts = {False: "", True: ""}
        self._piece: Piece | None = None

    def show(self, text: str, thought: bool, piece: Piece) -> None:
        self._texts[thought] += text
        again = piece is self._piece  # a token that ends the thoughts and begins the answer has two texts
        self._piece = piece
        line: dict[str, Any] = {"text": text, "thought": thought, "token": None if again else piece.token}
        if piece.logprob is not None and not again:
            line["logprob"] = piece.logprob
            line["top"] = [{"token": token, "logprob": logprob} for token, logprob in piece.top]
        print(json.dumps(line, ensure_ascii=False), flush=True)

    def end(self, answer: Generation, model: TextModel) -> None:
        # JSON has no infinity.
        biases = {id: bias if bias > -math.inf else None for id, bias in answer.sampling.logit_bias.items()}
        line = {
            "finish": answer.finish,
            "stop_string": answer.stop_string,
            "text": self._texts[False],
            "thoughts": self._texts[True],
            "tokens": answer.tokens,
            "model": model.variant.name,
            "fingerprint": model.fingerprint,
            "lossy": list(answer.session.lossy),
            "sampling": {**asdict(answer.sampling), "logit_bias": biases},
            "stats": answer.stats.to_dict(),
        }
        print(json.dumps(line, ensure_ascii=False), flush=True)
