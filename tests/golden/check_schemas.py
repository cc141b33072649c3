"""Holds the grammars of the server to the official test suite of JSON Schema: python check_schemas.py FOLDER

FOLDER is a clone of https://github.com/json-schema-org/JSON-Schema-Test-Suite. A schema of it is kept to, or refused
with words that name what cannot be kept to. Where it is kept to, every instance that is valid must be possible as an
answer, in one order of its members at least, and none that is not. The exit status is 1 where that is not so. Formats
are only told: to the standard they are notes, and here they are held to their shape (docs/serve.md).
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from moeflux.serve.constrain import Constraint, Grammars  # noqa: E402
from moeflux.serve.fields import RequestError  # noqa: E402
from moeflux.serve.grammars import grammar_of  # noqa: E402
from moeflux.serve.request import Ask, Form  # noqa: E402
from moeflux.serve.tools.families import HERMES  # noqa: E402
from support.vocabularies import byte_level  # noqa: E402

DRAFT = "tests/draft2020-12"
ORDERS = 1000  # of members that are tried
SHAPES = frozenset({"format", "date", "date-time", "time", "email", "hostname", "ipv6"})
"""Files about formats in which answers differ."""
KNOWN = frozenset({"ecmascript-regex"})
"""Patterns are those of Rust: U+FEFF is no white space there."""


def texts(value: Any) -> Iterator[str]:
    """A value as an answer may have it: members in every order, a whole number with its fraction and without."""
    if isinstance(value, dict):
        for order in itertools.permutations(value.items()):
            for members in itertools.product(*(list(itertools.islice(texts(each), ORDERS)) for _, each in order)):
                pairs = zip(order, members, strict=True)
                yield (
                    "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {one}" for (name, _), one in pairs) + "}"
                )
    elif isinstance(value, list):
        for items in itertools.product(*(list(itertools.islice(texts(each), ORDERS)) for each in value)):
            yield "[" + ", ".join(items) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and value.is_integer():
            yield str(int(value))


class Suite:
    def __init__(self) -> None:
        self.tokenizer = byte_level()
        self._end = len(self.tokenizer)
        self._grammars = Grammars(self.tokenizer, {self._end}, self._end + 1)

    def constraint(self, schema: Any) -> Constraint:
        text = grammar_of(Ask("m", form=Form(schema)), HERMES, False, "", lambda token: None)
        assert text is not None
        return self._grammars.compile(text, "schema")

    def possible(self, constraint: Constraint, value: Any) -> bool:
        return any(self._is_answer(constraint.again(), text) for text in itertools.islice(texts(value), ORDERS))

    def _is_answer(self, constraint: Constraint, text: str) -> bool:
        tokens = [*self.tokenizer.encode(text), self._end]
        for place, token in enumerate(tokens):
            bits = constraint(tokens[:place])
            if not bits[token // 32] >> (token % 32) & 1:
                return False
        return True


def main() -> int:
    suite, counts, wrong = Suite(), Counter[str](), 0
    for path in sorted((Path(sys.argv[1]) / DRAFT).rglob("*.json")):
        for group in json.loads(path.read_text()):
            if not isinstance(group["schema"], dict):
                counts["schemas that are no objects"] += 1
                continue
            name = f"{path.stem}: {group['description']}"
            try:
                constraint = suite.constraint(group["schema"])
            except RequestError as error:
                counts["schemas refused"] += 1
                print(f"refused: {name}: {error}")
                continue
            counts["schemas kept to"] += 1
            for test in group["tests"]:
                found = suite.possible(constraint, test["data"])
                if found == test["valid"]:
                    counts["instances right"] += 1
                    continue
                of_shape = path.stem in SHAPES | KNOWN
                counts["instances of formats and patterns otherwise" if of_shape else "instances wrong"] += 1
                wrong += not of_shape
                print(f"{'let through' if found else 'forbidden'}: {name}: {test['description']}: {test['data']!r:.80}")
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
