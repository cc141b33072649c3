"""A conversation in a terminal, or line by line through a pipe: what `moeflux chat` does."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Generator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from moeflux import files
from moeflux.cli.run import Printer, cancelled_by_ctrl_c
from moeflux.errors import ArgumentError, Error, StateError
from moeflux.machine.remembered import cache_folder
from moeflux.progress import Counting, for_terminal
from moeflux.text.conversation import Conversation, Reply
from moeflux.text.sampling import Sampling

__all__ = ["TerminalChat"]

HELP = """\
/help                show this list
/clear               start again; instructions stay
/retry               get another answer to the last question
/undo                take back the last question and its answer
/system [TEXT]       set the instructions; without TEXT, remove them
/show                show what was said
/set                 show the settings
/set NAME VALUE      change temperature, top_k, seed, max_tokens ...; the value "default" restores the model's own
/thinking on|off     think before the answer, where the model's template lets one choose
/effort LEVEL        think for a low, medium or high time, where the template has it
/stats               show what the last answer cost
/save FILE           save the conversation and the model's state
/load FILE           continue a saved conversation
/quit                end the program, as Ctrl-D does

To write several lines, end a line with \\, or put \"\"\" before the first and after the last.
Ctrl-C stops an answer and keeps what was said. To begin a message with /, type //."""
EFFORTS = ("low", "medium", "high")
HISTORY_LINES = 1000
HISTORY_BYTES = 16 << 20
BLOCK = '"""'


class Ended(Exception):
    """No more input is wanted."""


class TerminalChat:
    """`settings` go to `Session.generate`; /set changes them."""

    def __init__(self, talk: Conversation, settings: dict[str, Any], stats: bool = False) -> None:
        self.talk = talk
        self.settings = settings
        self.stats = stats
        self.last: Reply | None = None
        self.answers = 0
        self.interactive = sys.stdin.isatty()
        self.commands: dict[str, Callable[[str], None]] = {
            "help": lambda text: print(HELP),
            "clear": lambda text: talk.clear(),
            "retry": lambda text: self._answer(talk.retry),
            "undo": lambda text: talk.undo(),
            "system": lambda text: talk.set_system(text or None),
            "show": lambda text: self._show(),
            "set": self._set,
            "thinking": self._think,
            "effort": self._effort,
            "stats": lambda text: print(self.last.generation.stats if self.last else "nothing was answered yet"),
            "save": self._save,
            "load": self.load,
            "quit": self._quit,
            "exit": self._quit,
        }

    def run(self) -> int:
        """Runs until the input ends. Returns the exit status."""
        if self.interactive:
            print(f"{self.talk.session.model.variant.name}. /help lists the commands, Ctrl-D ends.", file=sys.stderr)
        with _line_editing(self.interactive):
            while True:
                try:
                    message = self._read()
                    if message is not None:
                        self._take(message)
                except Ended:
                    return 0
                except KeyboardInterrupt:
                    print("\n(Ctrl-D ends)" if self.interactive else "", file=sys.stderr)
                    if not self.interactive:
                        return 130
                except Error as error:
                    print(f"moeflux chat: {' '.join(str(error).split())}", file=sys.stderr)
                    if not self.interactive:
                        return 2

    # ---- Reading ------------------------------------------------------------------------------------------------

    def _read(self) -> str | None:
        """A message or a command, of one line or several; None if there is none."""
        line = self._line("> ")
        lines = [line]
        if line.lstrip().startswith(BLOCK):
            lines = [line.lstrip().removeprefix(BLOCK)]
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(self._line("... "))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._line("... "))
        message = "\n".join(lines).strip("\n")
        return message if message.strip() else None

    def _line(self, sign: str) -> str:
        try:
            return input(sign) if self.interactive else _next_line()
        except EOFError:
            if self.interactive:
                print(file=sys.stderr)
            raise Ended from None
        except UnicodeDecodeError as error:
            raise ArgumentError(f"input: expected UTF-8, found byte {error.start} of a line to be none") from error

    def _take(self, message: str) -> None:
        if not message.startswith("/"):
            self._answer(self.talk.ask, message)
        elif message.startswith("//"):
            self._answer(self.talk.ask, message[1:])
        else:
            name, _, rest = message[1:].partition(" ")
            if name not in self.commands:
                raise ArgumentError(f"/{name}: expected a command that /help lists")
            self.commands[name](rest.strip())

    # ---- Answering ----------------------------------------------------------------------------------------------

    def _answer(self, ask: Callable[..., Reply], *content: str) -> None:
        settings = dict(self.settings)
        if "seed" in settings:  # not the same numbers for every answer
            settings["seed"] = (settings["seed"] + self.answers) % (1 << 64)
        printer = Printer()
        with Counting(for_terminal(passing=True), "reading the prompt", "tokens") as counting:
            self.last = reply = ask(*content, **settings, on_progress=counting)
            try:
                with cancelled_by_ctrl_c(reply.generation):
                    for part in reply:
                        printer.show(part.text, part.thought, part.piece)
            except Error as error:
                # A read or an op failed, and the state may be in pieces.
                if not isinstance(error, (ArgumentError, StateError)):
                    self.talk.session.clear()
                raise
            finally:
                reply.close()
                printer.end(reply.generation, self.talk.session.model)
        self.answers += 1
        finish = reply.generation.finish
        if finish in ("length", "context"):
            limit = "max_tokens allows no more" if finish == "length" else "the context is full (/undo, /clear)"
            print(f"(stopped: {limit})", file=sys.stderr)
        elif finish == "cancelled":
            print("(stopped)" if reply.text or reply.thoughts else "(stopped before it began)", file=sys.stderr)
        if self.stats:
            print(reply.generation.stats, file=sys.stderr)

    # ---- Commands -----------------------------------------------------------------------------------------------

    def _show(self) -> None:
        for message in self.talk.messages:
            print(f"{message['role']}: {message['content']}")

    def _think(self, text: str) -> None:
        if text not in ("on", "off"):
            raise ArgumentError(f"/thinking: expected on or off, found {text or 'nothing'!r}")
        self.talk.thinking = text == "on"

    def _effort(self, text: str) -> None:
        if text not in EFFORTS:
            raise ArgumentError(f"/effort: expected {', '.join(EFFORTS)}, found {text or 'nothing'!r}")
        self.talk.reasoning_effort = text

    def _set(self, text: str) -> None:
        default = self.talk.session.model.default_sampling
        known = {field.name: getattr(default, field.name) for field in fields(Sampling) if field.name != "logit_bias"}
        known |= {"max_tokens": None}
        if not text:
            for name, value in known.items():
                now = self.settings.get(name, value)
                print(f"{name:<20}{'none' if now is None else now}")
            return
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if name not in known:
            raise ArgumentError(f"/set: expected {', '.join(known)}, found {name!r}")
        self.settings = {key: each for key, each in self.settings.items() if key != name} | self._checked(name, value)

    @staticmethod
    def _checked(name: str, value: str) -> dict[str, Any]:
        if value.strip() == "default":
            return {}
        try:
            number = int(value) if name in ("top_k", "seed", "max_tokens") else float(value)
        except ValueError:
            raise ArgumentError(f"{name}: expected a number or default, found {value!r:.40}") from None
        if name != "max_tokens":
            change: dict[str, Any] = {name: number}
            Sampling(**change)
        elif number < 1:
            raise ArgumentError(f"max_tokens: expected at least 1, found {number}")
        return {name: number}

    def _save(self, text: str) -> None:
        path = _path(text, "/save")
        if not self.talk.messages:
            raise StateError("/save: expected a conversation, found nothing said yet")
        with Counting(for_terminal(passing=True), "finishing", "tokens") as counting:
            self.talk.save(path, counting)
        print(f"kept in {path}", file=sys.stderr)

    def load(self, text: str) -> None:
        path = _path(text, "/load")
        self.talk.load(path)
        self.last = None
        questions = sum(message["role"] == "user" for message in self.talk.messages)
        print(f"{path}: {questions} questions, {self.talk.session.position} tokens", file=sys.stderr)

    def _quit(self, text: str) -> None:
        raise Ended


def _path(text: str, command: str) -> Path:
    try:
        words = shlex.split(text)
    except ValueError:
        words = [text]
    if len(words) != 1:
        raise ArgumentError(f"{command}: expected the name of one file, found {text or 'nothing'!r}")
    return files.expanded(words[0])


def _next_line() -> str:
    with files.system_errors("stdin"):
        line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


# ---- Lines that can be edited and come back ---------------------------------------------------------------------


@contextlib.contextmanager
def _line_editing(wanted: bool) -> Generator[None, None, None]:
    """Makes arrow keys work, and brings back the lines of earlier conversations, if the library is there."""
    library = _readline() if wanted else None
    if library is None:
        yield
        return
    # Not by the library's own functions, which open whatever lies there.
    with contextlib.suppress(RuntimeError):  # of having no home, and errors of ours
        for line in files.read_text(_history(), HISTORY_BYTES).replace("\0", "").split("\n")[-HISTORY_LINES:]:
            if line:
                library.add_history(line)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            count = library.get_current_history_length()
            items = (library.get_history_item(place) for place in range(max(1, count - HISTORY_LINES + 1), count + 1))
            text = "".join(f"{item}\n" for item in items if item)
            files.make_folder(_history().parent)
            files.write_atomically(_history(), [text.encode(errors="replace")], private=True)


def _history() -> Path:
    return cache_folder() / "chat_history"


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline
