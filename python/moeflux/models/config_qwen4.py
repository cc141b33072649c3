"""config.json of qwen4_exp: its text part."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeflux.models.config_fields import Fields
from moeflux.models.config_parts import common, full_layers, layer_count, partial_rope
from moeflux.models.config_qwen import gated_delta, grouped
from moeflux.models.layers import (
    Index,
    Layer,
    Mixer,
    NgramEmbedding,
    ResidualStreams,
    RoutedExperts,
    Router,
    SharedExpert,
)
from moeflux.models.variants import Variant

INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
ATTENDS = ("full_attention", "indexed_attention")  # the same kind


def read_qwen4(fields: Fields, declared: str, name: str) -> Variant:
    """qwen4_exp: residual streams that gates mix, layers of delta-net and of attention to rows that an indexer picks,
    experts in every layer, and rows of n-gram tables that enter some layers."""
    fields.only("norm_topk_prob", True)
    fields.seen.add("mtp")  # of the layer for drafts
    layers = layer_count(fields)
    shared = common(fields, declared, name)
    experts = RoutedExperts(
        count=fields.count("num_experts"),
        per_token=fields.count("num_experts_per_tok"),
        intermediate=fields.count("moe_intermediate_size"),
        router=Router(scoring="softmax"),
        shared=SharedExpert(intermediate=fields.count("shared_expert_intermediate_size"), gated=True),
    )
    mixers = _mixers(fields, layers)
    ngrams = _ngrams(fields, layers, shared)
    return Variant(
        layers=tuple(Layer(mixer, experts, ngrams.get(i)) for i, mixer in enumerate(mixers)),
        streams=ResidualStreams(count=fields.count("hc_count", minimum=2), rank=fields.count("hc_lowrank")),
        **shared,
    )


def _mixers(fields: Fields, layers: int) -> list[Mixer]:
    heads, head_dim = fields.count("num_attention_heads"), fields.count("head_dim")
    full = grouped(fields, heads, head_dim, partial_rope(fields, head_dim), gate=True)
    fields.only("output_gate_type", "sigmoid", "silu", None)
    delta = gated_delta(fields, sigmoid=fields.values.get("output_gate_type") == "sigmoid")
    attends = full_layers(_with_usual_names(fields), layers)
    fields.seen |= {"layer_types", "full_attention_interval"}
    if any(attends):
        full = dataclasses.replace(full, index=_index(fields))
    fields.seen |= set(INDEXER)
    return [full if each else delta for each in attends]


def _with_usual_names(fields: Fields) -> Fields:
    names = fields.values.get("layer_types")
    if not isinstance(names, list):
        return fields
    usual = ["full_attention" if kind in ATTENDS else kind for kind in names]
    return Fields({**fields.values, "layer_types": usual}, fields.where)


def _index(fields: Fields) -> Index:
    """A budget of rows, which are picked in units of so many."""
    fields.only("indexer_kv_heads", 1)
    unit, budget = fields.count("indexer_compress_ratio", minimum=2), fields.count("indexer_budget")
    if 256 % unit or budget % unit:
        raise fields.fail("indexer_compress_ratio", "a divisor of 256 and of indexer_budget")
    heads, dim = fields.count("indexer_n_heads"), fields.count("indexer_head_dim")
    return Index(heads=heads, dim=dim, count=budget // unit, unit=unit)


def _ngrams(fields: Fields, layers: int, shared: dict[str, Any]) -> dict[int, NgramEmbedding]:
    """The n-gram embeddings, by layer. Published layers count from 1."""
    sizes: dict[str, Any] = {
        "width": fields.count("ple_embed_dim", shared["hidden_size"]),
        "length": fields.count("ngram_size", 3, minimum=2),
        "heads": fields.count("heads_per_ngram", 8),
        "min_rows": fields.count("ngram_vocab_size_base", 20_000_000),
        "divisor": fields.count("make_ngram_vocab_size_divisible_by", 128),
        "seed": fields.count("seed", 1234, minimum=0),
        "parts": fields.count("split_ngram_parts", 512),
        "taps": fields.count("ple_conv_kernel_size", 4),
    }
    # Conversion widens no table, and one in eight bits would have scales that nobody has seen.
    fields.only("ple_embedding_dtype", None, "bfloat16", "float16", "float32")
    numbers = sorted(set(fields.counts("ple_layer_ids")))
    if not numbers:
        return {}
    if not 1 <= numbers[0] <= numbers[-1] <= layers:
        raise fields.fail("ple_layer_ids", f"layers from 1 to {layers}")
    if not shared["eos_ids"]:
        raise fields.fail("eos_token_id", "a token at which n-grams end")
    return {
        number - 1: NgramEmbedding(index=index, end_id=shared["eos_ids"][0], **sizes)
        for index, number in enumerate(numbers)
    }
