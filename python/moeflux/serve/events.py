"""What an answer is made of, as it comes: thoughts, text and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Arguments", "Call", "CallBegin", "CallEnd", "Event", "Said", "Text", "Thought", "joined", "together"]


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class CallBegin:
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next part of the JSON of the arguments of the call that has begun."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    complete: bool = True  # False: the answer was cut inside the call


Event = Text | Thought | CallBegin | Arguments | CallEnd
"""Between a CallBegin and its CallEnd there are only Arguments."""

GROWING = (Text, Thought, Arguments)


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str  # JSON
    complete: bool = True


@dataclass
class Said:
    """A whole answer."""

    text: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with fewer events: what grows one text grows it once."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, GROWING) and isinstance(last, GROWING) and type(event) is type(last):
            found[-1] = type(event)(last.text + event.text)
        else:
            found.append(event)
    return found


def together(events: Iterable[Event]) -> Said:
    said, begun, parts = Said(), CallBegin("", ""), list[str]()
    for event in events:
        if isinstance(event, Text):
            said.text += event.text
        elif isinstance(event, Thought):
            said.thought += event.text
        elif isinstance(event, CallBegin):
            begun, parts = event, []
        elif isinstance(event, Arguments):
            parts.append(event.text)
        else:
            said.calls.append(Call(begun.id, begun.name, "".join(parts), event.complete))
    return said
