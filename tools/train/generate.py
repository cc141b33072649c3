"""Text for those who have none: small stories, questions about them, facts and small talk, from text/*.txt and a seed.

A story keeps track of who and what is in it, so that questions about it have answers. Nothing here needs torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parent / "text"
SYSTEM = "You are a helpful assistant."
NUMBERS = "zero one two three four five six".split()
COUNTED = "apples nuts books coins eggs flowers buttons shells".split()
SHARES = {"story": 30, "told": 20, "reading": 15, "talk": 35}
"""How often each kind of document comes, of 100: stories on request, alone, with a question to be answered; talk."""

Turns = list[str]  # user, assistant, user, ...


# ---- The template files -----------------------------------------------------------------------------------------


class Word(str):
    """Text for a template, where "{x:an}" puts its article before it, "{x:An}" with a capital, and "{x:up}" is itself
    with one."""

    def __format__(self, form: str) -> str:
        if form in ("an", "An"):
            return f"{form if self[:1].lower() in 'aeiou' else form[0]} {self}"
        return str(self[:1].upper() + self[1:] if form == "up" else self)


@dataclass
class Section:
    """One "==" of a file: lines by their first sign, and paragraphs of the lines without any."""

    weight: int = 1
    questions: list[tuple[list[str], list[str]]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    morals: list[str] = field(default_factory=list)
    rows: list[list[Word]] = field(default_factory=list)
    paragraphs: list[list[list[str]]] = field(default_factory=lambda: [[]])


def read_lines(name: str) -> tuple[dict[str, str], dict[str, Section]]:
    """The lists and the sections of a file, by name."""
    lists: dict[str, str] = {}
    sections: dict[str, Section] = {}
    section = Section()
    for line in (TEXT / name).read_text(encoding="utf-8").splitlines():
        sign, _, rest = line.partition(" ")
        if sign == "==":
            title, _, weight = rest.rpartition(" ")
            section = Section(int(weight)) if weight.isdecimal() else Section()
            sections[title if weight.isdecimal() else rest] = section
        elif sign.startswith("@"):
            lists[sign[1:]] = rest
        elif sign == "?":
            question, answer = rest.split(" -> ")
            section.questions.append((question.split(" | "), answer.split(" | ")))
        elif sign == ">":
            section.requests += rest.split(" | ")
        elif sign == "!":
            section.morals += rest.split(" | ")
        elif " = " in line:
            section.rows.append([Word(cell) for cell in line.split(" = ")])
        elif not line:
            section.paragraphs.append([])
        elif sign != "#":
            section.paragraphs[-1].append(line.split(" | "))
    return lists, sections


# ---- Stories ----------------------------------------------------------------------------------------------------


class Character:
    def __init__(self, chance: random.Random, lists: dict[str, list[str]], taken: set[str]) -> None:
        """Nobody else in the story has a name or, but for girls and boys, a kind that is `taken`."""
        is_girl = chance.random() < 0.5
        child = "girl" if is_girl else "boy"
        self.name = chance.choice([name for name in lists[child] if name not in taken])
        animal = chance.choice([kind for kind in lists["animal"] if kind not in taken])
        self.kind = Word(child if chance.random() < 0.3 else animal)
        taken |= {self.name, self.kind}
        self.he, self.him, self.his = ("she", "her", "her") if is_girl else ("he", "him", "his")
        self.He, self.His = self.he.capitalize(), self.his.capitalize()

    def __format__(self, form: str) -> str:
        return self.name


class Scene(dict):
    """What fills a story's braces: characters, and a word of each list, drawn when it is first needed."""

    def __init__(self, chance: random.Random, lists: dict[str, list[str]]) -> None:
        taken: set[str] = set()
        super().__init__({name: Character(chance, lists, taken) for name in "abc"})
        self.chance, self.lists = chance, lists

    def __missing__(self, name: str) -> Word:
        self[name] = Word(self.chance.choice(self.lists[name]))
        return self[name]

    def say(self, alternatives: list[str]) -> str:
        """One of them, filled."""
        return self.chance.choice(alternatives).format_map(self)


@dataclass
class Story:
    request: str
    text: str
    questions: list[tuple[str, str]]


class Generator:
    """Documents without end: the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        words, self.plots = read_lines("stories.txt")
        self.lists = {name: items.split(", ") for name, items in words.items()}
        self.every = self.plots.pop("every")
        sorts, self.topics = read_lines("chats.txt")
        # name -> what one of them is called, and all of them
        self.sorts = {name: (line.split(": ")[0][2:], line.split(": ")[1].split(", ")) for name, line in sorts.items()}

    def documents(self) -> Iterator[dict[str, Any]]:
        """As lines of a .jsonl file of a corpus."""
        kinds, weights = list(SHARES), list(SHARES.values())
        while True:
            kind = self.chance.choices(kinds, weights)[0]
            yield {"text": self.a_story().text} if kind == "told" else self.chat(getattr(self, kind)())

    def chat(self, turns: Turns) -> dict[str, Any]:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        system = [{"role": "system", "content": SYSTEM}] if self.chance.random() < 0.1 else []
        return {"messages": system + messages}

    def a_story(self) -> Story:
        plot = self.chance.choice(list(self.plots.values()))
        scene = Scene(self.chance, self.lists)
        paragraphs = [[*self.every.paragraphs[0], *plot.paragraphs[0]], *plot.paragraphs[1:]]
        told = [" ".join(map(scene.say, places)) for places in paragraphs if places]
        scene["moral"] = Word(self.chance.choice(plot.morals))
        if self.chance.random() < 0.5:
            told.append(
                self.chance.choice(["", "The moral of the story is: ", "And so they learned: "]) + scene["moral"]
            )
        questions = [(scene.say(asked), scene.say(said)) for asked, said in self.every.questions + plot.questions]
        return Story(scene.say(self.every.requests), "\n\n".join(told), questions)

    # ---- Each kind of document ----------------------------------------------------------------------------------

    def story(self) -> Turns:
        """A story on request, and sometimes questions about it."""
        story = self.a_story()
        asked = self.chance.sample(story.questions, self.chance.choice([0, 0, 1, 1, 2]))
        return [story.request, story.text, *(text for pair in asked for text in pair)]

    def reading(self) -> Turns:
        story = self.a_story()
        question, answer = self.chance.choice(story.questions)
        return [f"Read this story and answer the question.\n\n{story.text}\n\nQuestion: {question}", answer]

    def talk(self) -> Turns:
        """A few short questions. Several in most, or a corpus without repeated documents would have little of them."""
        exchanges = (self.topic, self.topic, self.arithmetic, self.naming)
        count = self.chance.randint(1, 6)
        return [text for exchange in self.chance.choices(exchanges, k=count) for text in exchange()]

    def topic(self) -> Turns:
        topics = list(self.topics.values())
        topic = self.chance.choices(topics, [topic.weight for topic in topics])[0]
        asked, said = self.chance.choice(topic.questions)
        row = self.chance.choice(topic.rows or [[]])
        return [self.chance.choice(each).format(*row) for each in (asked, said)]

    def naming(self) -> Turns:
        """Some of a sort, or whether one is of a sort."""
        sort, (one, members) = self.chance.choice(list(self.sorts.items()))
        if self.chance.random() < 0.5:
            count = self.chance.randint(2, 5)
            named = self.chance.sample(members, count)
            ask = self.chance.choice(["Name {} {}.", "List {} {}.", "Can you name {} {}?"])
            return [ask.format(NUMBERS[count], sort), f"{Word(', '.join(named[:-1])):up} and {named[-1]}."]
        member = Word(self.chance.choice(members))
        member = member if sort == "colors" else Word(f"{member:an}")
        other, (of_other, others) = self.chance.choice(list(self.sorts.items()))
        question = f"Is {member} {Word(of_other):an}?"
        if other == sort or member.split(" ")[-1] in others:
            return [question, f"Yes, {member} is {Word(of_other):an}."]
        return [question, f"No, {member} is not {Word(of_other):an}. {member:up} is {Word(one):an}."]

    def arithmetic(self) -> Turns:
        draw = self.chance.randint
        kind = self.chance.choice(["plus", "minus", "times", "count", "more", "fewer"])
        a, b = draw(0, 20), draw(0, 20)
        if kind == "plus":
            return [self.chance.choice([f"What is {a} plus {b}?", f"What is {a} + {b}?"]), f"{a} plus {b} is {a + b}."]
        if kind == "minus":
            a, b = max(a, b), min(a, b)
            return [
                self.chance.choice([f"What is {a} minus {b}?", f"What is {a} - {b}?"]),
                f"{a} minus {b} is {a - b}.",
            ]
        if kind == "times":
            a, b = draw(0, 12), draw(0, 12)
            return [
                self.chance.choice([f"What is {a} times {b}?", f"What is {a} * {b}?"]),
                f"{a} times {b} is {a * b}.",
            ]
        if kind == "count":
            return [f"Count from {a} to {a + 5}.", ", ".join(str(n) for n in range(a, a + 6)) + "."]
        who, what = self.chance.choice(self.lists["girl"] + self.lists["boy"]), self.chance.choice(COUNTED)
        a, b = draw(4, 12), draw(1, 3)
        if kind == "more":
            question = f"{who} has {a} {what}. {who} gets {b} more. How many {what} does {who} have now?"
            return [question, f"{a} plus {b} is {a + b}. So {who} has {a + b} {what} now."]
        question = f"{who} has {a} {what} and gives away {b}. How many {what} does {who} have left?"
        left = f"{a - b} {what}" if a - b > 1 else f"1 {what[:-1]}"
        return [question, f"{a} minus {b} is {a - b}. So {who} has {left} left."]


def write_corpus(path: Path, count: int, seed: int) -> int:
    """`count` documents as lines of JSON. -> characters written"""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for document, _ in zip(Generator(seed).documents(), range(count), strict=False):
            written += file.write(json.dumps(document, ensure_ascii=False) + "\n")
    return written
