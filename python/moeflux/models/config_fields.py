"""A JSON object that is read field by field, so that what nobody asked for can be refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moeflux.errors import FormatError

REQUIRED = object()

BLOCKS = {
    "attn_logit_softcapping": "a soft cap of attention's scores",
    "clip_qkv": "attention with clipped queries, keys and values",
    "hc_mult": "residual streams with gated mixing (hyper-connections)",
    "index_head_dim": "an indexer that picks the rows to attend to",
    "index_n_heads": "an indexer that picks the rows to attend to",
    "index_topk": "an indexer that picks the rows to attend to",
    "linear_attn_config": "linear attention with a gate for each channel",
    "mamba_d_state": "a state-space mixer",
    "sparse_attention_config": "attention to blocks of rows that an indexer picks",
    "ssm_state_size": "a state-space mixer",
    "zero_expert_num": "experts that compute nothing",
}
"""Fields that models have whose blocks moeflux lacks -> the block. Where a reader knows such a field, it decides."""


def missing_blocks(fields: Iterable[str]) -> str:
    """What these fields say is missing, as the end of an error; empty where they say nothing."""
    named: dict[str, list[str]] = {}
    for field in sorted(fields):
        if field in BLOCKS:
            named.setdefault(BLOCKS[field], []).append(field)
    blocks = "; ".join(f"{block} ({', '.join(names)})" for block, names in named.items())
    return f"; moeflux does not have what the model needs: {blocks}" if blocks else ""


class Fields:
    """One JSON object being read: remembers which fields were asked for, so that `finish` can refuse the rest."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise FormatError(f"{where}: expected an object, found {type(values).__name__}")
        self.values = values
        self.where = where
        self.seen: set[str] = set()

    def fail(self, field: str, expected: str) -> FormatError:
        found = repr(self.values[field]) if field in self.values else "nothing"
        return FormatError(f"{self.where}: {field}: expected {expected}, found {found[:120]}")

    def get(self, field: str, kind: type | tuple[type, ...], expected: str, default: Any) -> Any:
        """The field's value; the default when it is absent or null."""
        self.seen.add(field)
        value = self.values.get(field)
        if value is None:
            if default is REQUIRED:
                raise self.fail(field, expected)
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fail(field, expected)
        return value

    def count(self, field: str, default: Any = REQUIRED, minimum: int = 1) -> int:
        value: int = self.get(field, int, f"a whole number of at least {minimum}", default)
        if value is not default and not minimum <= value < 1 << 31:
            raise self.fail(field, f"a whole number of at least {minimum}")
        return value

    def number(self, field: str, default: Any = REQUIRED) -> Any:
        """A float, or None where that is the default."""
        value = self.get(field, (int, float), "a number", default)
        return value if value is None else float(value)

    def flag(self, field: str, default: bool) -> bool:
        value: bool = self.get(field, bool, "true or false", default)
        return value

    def counts(self, field: str) -> list[int]:
        values: list[int] = self.get(field, list, "a list of layer numbers", [])
        if not all(type(value) is int and value >= 0 for value in values):
            raise self.fail(field, "a list of layer numbers")
        return values

    def only(self, field: str, *supported: Any) -> None:
        """Checks that the field, if it is there at all, has one of the values that moeflux supports."""
        self.seen.add(field)
        if self.values.get(field, supported[0]) not in supported:
            raise self.fail(field, " or ".join(repr(value) for value in supported))

    def said(self, *fields: str) -> None:
        """Checks that these fields are there, if only as null: implementations disagree about their defaults."""
        for field in fields:
            if field not in self.values:
                raise self.fail(field, "a value, for implementations differ about its default")

    def finish(self, irrelevant: frozenset[str]) -> None:
        unknown = sorted(self.values.keys() - self.seen - irrelevant)
        if unknown:
            others = [f'"{name:.60}"' for name in unknown[1:20]] + (["others"] if len(unknown) > 20 else [])
            raise FormatError(
                f'{self.where}: field "{unknown[0]:.60}" is not one that moeflux knows for this architecture'
                f"{', nor are ' + ', '.join(others) if others else ''}{missing_blocks(unknown)}; "
                f"supported: {', '.join(sorted(self.seen))}"
            )
