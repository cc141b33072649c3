"""config.json of qwen4_exp: the published one is the preset, and what nobody could compute is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moeflux import PRESETS, FormatError
from moeflux.models.config import variant_from_config
from moeflux.models.layers import GatedDelta, GroupedAttention
from moeflux.models.ngrams import table_rows
from moeflux.models.write_config import config_of
from support.published_configs import QWEN38_FLASH_NEXT

TEXT = QWEN38_FLASH_NEXT["text_config"]
NAME = "Qwen3.8-Flash-Next"


def test_the_published_config_is_the_preset() -> None:
    for config in (QWEN38_FLASH_NEXT, TEXT):
        assert dataclasses.replace(variant_from_config(config), name=NAME) == PRESETS[NAME]
    assert dataclasses.replace(variant_from_config(config_of(PRESETS[NAME])), name=NAME) == PRESETS[NAME]


def test_published_sizes() -> None:
    """125 billion parameters beside 51 billion of the table, of which a token has 16 rows of 320 bytes."""
    variant = PRESETS[NAME]
    shape = variant.layers[1].ngram
    assert shape is not None and [i for i, layer in enumerate(variant.layers) if layer.ngram] == [1]
    assert (table_rows(shape), shape.row_width, shape.rows_per_token) == (320_001_536, 160, 16)
    assert table_rows(shape) * shape.row_width * 2 == 102_400_491_520
    assert len(variant.layers_with(GatedDelta)) == 36 and len(variant.layers_with(GroupedAttention)) == 12


def test_names_of_transformers_for_layers() -> None:
    kinds = ["indexed_attention" if kind == "full_attention" else kind for kind in TEXT["layer_types"]]
    assert variant_from_config({**TEXT, "layer_types": kinds}) == variant_from_config(TEXT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_kv_heads": 2}, "indexer_kv_heads: expected 1"),
        ({"indexer_compress_ratio": 3}, "indexer_compress_ratio: expected a divisor of 256 and of indexer_budget"),
        ({"indexer_budget": None}, "indexer_budget: expected a whole number"),
        ({"ple_embedding_dtype": "float8_e4m3fn"}, "ple_embedding_dtype: expected None or 'bfloat16'"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids: expected layers from 1 to 48"),
        ({"ple_layer_ids": [49]}, "ple_layer_ids: expected layers from 1 to 48"),
        ({"eos_token_id": None, "bos_token_id": None}, "eos_token_id: expected a token at which n-grams end"),
        ({"output_gate_type": "relu"}, "output_gate_type: expected 'sigmoid' or 'silu'"),
        ({"hc_count": 1}, "hc_count: expected a whole number of at least 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob: expected True"),
        ({"split_ngram_parts": 7}, "ngram.parts: expected a divisor of 320001536 rows"),
        ({"hc_other": 1}, 'field "hc_other" is not one that moeflux knows'),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        variant_from_config({**TEXT, **changes})
