"""Tokens that divide what a model says."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["Marks"]


class Marks(dict[str, str]):
    """Tokens by their names, and a character for each that Unicode keeps free: what a model spells in letters, because
    somebody asked about this very form, divides nothing."""

    def __init__(self, names: Sequence[str] = (), first: int = 0) -> None:
        """`first` is the character of the first one; the others follow it."""
        super().__init__({name: chr(first + place) for place, name in enumerate(names)})
        self._named = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def heard(self, text: str) -> str:
        """The text with marks as their characters."""
        return self._named.sub(lambda found: self[found[0]], text)

    def spelled(self, text: str) -> str:
        """The text with marks in letters."""
        for name, mark in self.items():
            text = text.replace(mark, name)
        return text
