"""What a model is made of: `Variant`, a list of layers and what they share.

A variant is a frozen value. It is read from a checkpoint's config.json (`variant_from_config`), from a store's
moeflux.json (`Variant.from_dict`) or taken from the presets. Everything that needs a dimension takes it from here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import typing
from dataclasses import dataclass
from typing import Any, TypeGuard

from moeflux._core import QuantFormat, read_variant, state_pieces, variant_identity
from moeflux.errors import ArgumentError, FormatError, found
from moeflux.models.layers import (
    DenseMlp,
    FeedForward,
    GatedDelta,
    GroupedAttention,
    LatentAttention,
    Layer,
    Mixer,
    NgramEmbedding,
    ResidualStreams,
    RoutedExperts,
)

__all__ = ["MAX_CONTEXT", "QuantFormat", "Variant"]

MAX_CONTEXT = 1 << 20
"""Positions a session may hold at most, and the largest length a snapshot may claim."""

MODEL_TYPES = (
    "qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "qwen2_moe", "mixtral", "olmoe",
    "deepseek_v2", "gpt_oss", "gemma4", "deepseek_v32", "qwen4_exp", "glm_moe_dsa",
)  # fmt: skip

DRAFTING = ("qwen3_5_moe", "qwen3_next", "deepseek_v3")
"""Model types whose checkpoints have a layer for multi-token prediction that is known here."""

KINDS: dict[str, type] = {
    "grouped_attention": GroupedAttention,
    "latent_attention": LatentAttention,
    "gated_delta": GatedDelta,
    "routed_experts": RoutedExperts,
    "dense_mlp": DenseMlp,
}
"""What a part is called where a variant is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A model as data. The rules that it obeys are those of its twin, csrc/models/variant.h."""

    name: str
    model_type: str  # one of MODEL_TYPES
    layers: tuple[Layer, ...]  # first to last
    draft: Layer | None = None  # numbered behind them: it guesses the token after the next

    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    max_context: int
    tied_embeddings: bool = False  # the embedding is the output matrix too; there is no lm_head
    embedding_scale: float = 1.0  # by which a row of the embedding begins the stream
    logit_cap: float = 0.0  # logits are cap * tanh(logits / cap); 0: as they are
    streams: ResidualStreams | None = None  # without them the residual stream is one, and norms read it

    # Tokens with a meaning to the engine's users; -1 is an absent one.
    eos_ids: tuple[int, ...] = ()
    bos_id: int = -1
    think_start_id: int = -1
    think_end_id: int = -1

    # One sentence for each departure from the model as published; empty for a faithful one.
    lossy: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        read_variant(self.to_json(), self.name)

    # ---- Layers -------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layers_with(self, *parts: type) -> tuple[int, ...]:
        """The layers whose mixer or feed-forward part is one of these."""
        pairs = ((layer.mixer, layer.feed_forward) for layer in self.layers)
        return tuple(i for i, pair in enumerate(pairs) if any(isinstance(each, parts) for each in pair))

    def layer(self, index: int) -> Layer:
        """The layer of that number, which may be the one that drafts."""
        return self.layers[index] if self.draft is None or index < self.num_layers else self.draft

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts, and the one that drafts if it has some."""
        drafts = self.draft is not None and isinstance(self.draft.feed_forward, RoutedExperts)
        return (*self.layers_with(RoutedExperts), *([self.num_layers] if drafts else []))

    def is_of_draft(self, name: str) -> bool:
        """Whether a tensor belongs to the layer that drafts."""
        return self.draft is not None and name.startswith(f"model.layers.{self.num_layers}.")

    @property
    def experts(self) -> RoutedExperts:
        """The experts of the first layer that has any. Their count, width and number per token are the same in all."""
        return next(layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, RoutedExperts))

    def state(self, position: int, *, all_rows: bool = False) -> dict[tuple[int, str], tuple[int, ...]]:
        """What a session needs after so many tokens: (layer, piece) -> shape, in layer order. Of layers with a window
        these are the rows that the next one sees, or, with `all_rows`, those of every position."""
        return {
            (layer, name): (rows_seen(position, 0 if all_rows else window) // unit, *shape) if rows else tuple(shape)
            for layer, name, rows, shape, unit, window in state_pieces(self.to_json())
        }

    def state_numbers(self) -> tuple[int, int]:
        """How many numbers a session remembers, whatever its length, and how many more with each position, which layers
        with a window forget again."""
        fixed = row = 0
        for _, _, rows, shape, unit, _ in state_pieces(self.to_json()):
            count = -(-math.prod(shape) // unit)
            fixed, row = (fixed, row + count) if rows else (fixed + count, row)
        return fixed, row

    def window_numbers(self) -> int:
        """How many of the numbers that come with each position belong to layers with a window."""
        return sum(math.prod(shape) for _, _, rows, shape, _, window in state_pieces(self.to_json()) if rows and window)

    def state_heads(self) -> int:
        """How many heads a session remembers with each position: each has a scale of its own where rows are codes."""
        return sum(math.prod(shape[:-1]) for _, _, rows, shape, _, _ in state_pieces(self.to_json()) if rows)

    @property
    def forgets(self) -> bool:
        """Whether a session cannot go back to every position: recurrent layers and windows keep what the next token
        needs."""
        return any(not rows or window for _, _, rows, _, _, window in state_pieces(self.to_json()))

    # ---- Making variants ----------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, fields: Any, where: str = "variant", version: int = 2) -> Variant:
        """Inverse of `to_dict`. Older stores describe their model in `version` 1."""
        if not isinstance(fields, dict):
            raise FormatError(f"{where}: expected an object, found {type(fields).__name__}")
        try:
            text = json.dumps(fields)
        except (TypeError, ValueError) as error:
            raise FormatError(f"{where}: {error}") from None
        values = read_variant(text, where, version)
        parts = {name: [_made(part) for part in values.pop(name)] for name in ("mixers", "feed_forwards")}
        ngrams = [_of(NgramEmbedding, part) for part in values.pop("ngrams", [])]
        layers, drafts = (
            tuple(
                Layer(parts["mixers"][m], parts["feed_forwards"][f], *(ngrams[i] for i in rest))
                for m, f, *rest in values.pop(name, [])
            )
            for name in ("layers", "draft")
        )
        if "streams" in values:
            values["streams"] = _of(ResidualStreams, values["streams"])
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return cls(layers=layers, draft=next(iter(drafts), None), **(values | lists))

    def to_dict(self) -> dict[str, Any]:
        """Equal parts are written once, and fields that have their default are left out."""
        values = _fields(self)
        layers = [*self.layers, *([self.draft] if self.draft else [])]
        mixers: list[Mixer] = list(dict.fromkeys(layer.mixer for layer in layers))
        rest: list[FeedForward] = list(dict.fromkeys(layer.feed_forward for layer in layers))
        values["mixers"] = [_said(mixer) for mixer in mixers]
        values["feed_forwards"] = [_said(part) for part in rest]
        ngrams = list(dict.fromkeys(layer.ngram for layer in layers if layer.ngram))
        if ngrams:
            values["ngrams"] = [_fields(ngram) for ngram in ngrams]
        numbers = [
            [
                mixers.index(each.mixer),
                rest.index(each.feed_forward),
                *([ngrams.index(each.ngram)] if each.ngram else []),
            ]
            for each in layers
        ]
        values["layers"] = numbers[: self.num_layers]
        if self.draft:
            values["draft"] = numbers[self.num_layers :]
        return values

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def identity(self) -> dict[str, Any]:
        """What fingerprints are made of. It is in version 1 where that can describe the model, so that older
        fingerprints stay the same. A layer that drafts decides about no answer, so it is no part of it."""
        return variant_identity(self.to_json())

    def with_layers(self, layers: int) -> Variant:
        """The same model cut to its first layers, or lengthened by repeating its pattern of mixers."""
        if layers < 1:
            raise ArgumentError(f"layers: expected at least 1, found {layers}")
        period = self._period()
        made = tuple(
            Layer(
                self.layers[i if i < self.num_layers else i % period].mixer,
                self.layers[min(i, self.num_layers - 1)].feed_forward,
                self.layers[i].ngram if i < self.num_layers else None,
            )
            for i in range(layers)
        )
        return dataclasses.replace(self, layers=made)

    def _period(self) -> int:
        """After how many layers the pattern of mixers repeats."""
        mixers = [layer.mixer for layer in self.layers]
        fits = (n for n in range(1, self.num_layers) if all(a == b for a, b in zip(mixers, mixers[n:], strict=False)))
        return next(fits, self.num_layers)

    def with_parts(self, part: type, **changes: Any) -> Variant:
        """The same model with other values in every part of that type, wherever it is (a mixer, a router, a rope)."""
        layers = tuple(_changed(layer, part, changes) for layer in self.layers)
        return dataclasses.replace(self, layers=layers, draft=_changed(self.draft, part, changes))

    def with_draft(self) -> Variant:
        """The same model with the layer that drafts: it attends as the last layer that does, and has experts."""
        if self.model_type not in DRAFTING:
            raise ArgumentError(
                f"{self.name}: expected a model of {', '.join(DRAFTING)}, whose layer that drafts is known, found one "
                f"of {self.model_type}"
            )
        mixer = next(each.mixer for each in reversed(self.layers) if not isinstance(each.mixer, GatedDelta))
        return dataclasses.replace(self, draft=Layer(mixer, self.experts))

    def without_draft(self) -> Variant:
        return dataclasses.replace(self, draft=None)

    def with_experts_per_token(self, experts: int) -> Variant:
        """The same model with fewer or more experts per token than it was trained with. This is lossy, and the variant
        says so wherever it is shown."""
        if experts == self.experts.per_token:
            return self
        if not 1 <= experts <= self.experts.count:
            raise ArgumentError(
                f"experts_per_token: expected at most num_experts, {self.experts.count}, and at least 1, "
                f"found {found(experts)}"
            )
        note = f"uses {experts} experts per token, the model's own number is {self.experts.per_token}"
        return dataclasses.replace(self.with_parts(RoutedExperts, per_token=experts), lossy=(*self.lossy, note))


# ---- Values as JSON ---------------------------------------------------------------------------------------------


def rows_seen(position: int, window: int) -> int:
    """How many of the rows before a position its own row sees."""
    return min(position, window - 1) if window else position


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fields(value: Any) -> dict[str, Any]:
    """The fields that do not have their default, with numbers in the type of the field."""
    values = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if item == field.default:
            continue
        if dataclasses.is_dataclass(item):
            item = _fields(item)
        elif isinstance(item, tuple):
            item = list(item)
        elif _hints(value.__class__)[field.name] is float and type(item) is int:
            item = float(item)
        values[field.name] = item
    return values


def _said(part: Any) -> dict[str, Any]:
    return {"kind": next(name for name, kind in KINDS.items() if type(part) is kind), **_fields(part)}


def _made(values: dict[str, Any]) -> Any:
    """The part that these values describe; the core has checked them."""
    kind = KINDS[values["kind"]]
    return _of(kind, {key: value for key, value in values.items() if key != "kind"})


def _is_part(hint: Any) -> TypeGuard[type]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _of(kind: type, values: dict[str, Any]) -> Any:
    hints = _hints(kind)
    nested = {
        key: _of(next(t for t in (hints[key], *typing.get_args(hints[key])) if _is_part(t)), value)
        for key, value in values.items()
        if isinstance(value, dict)
    }
    return kind(**(values | nested))


def _changed(value: Any, part: type, changes: dict[str, Any]) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    inner = {field.name: _changed(getattr(value, field.name), part, changes) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **(inner | (changes if isinstance(value, part) else {})))
