"""What a token of a model costs: bytes that are read, and kept."""

from __future__ import annotations

from math import prod
from typing import TypedDict

from moeflux._core import StoreDirectory, Tensor
from moeflux.models.layers import RoutedExperts
from moeflux.models.variants import Variant
from moeflux.stores.floats import FLOAT_BYTES

__all__ = [
    "Costs",
    "bytes_touched",
    "costs",
    "costs_of_shape",
    "dense_sizes",
    "embedding_bytes",
    "mean_expert_bytes",
    "table_bytes",
]


class Costs(TypedDict):
    """Bytes, and how many experts all layers have. The layer that drafts is not counted."""

    experts: int
    dense_bytes_per_token: int
    expert_bytes_per_token: int
    state_bytes: int
    kv_bytes_per_position: int
    q8_bytes_per_position: int
    window_bytes_per_position: int  # f32: the part of kv_bytes_per_position that layers with a window forget again


def costs(variant: Variant, directory: StoreDirectory) -> Costs:
    sizes = {name: size for name, size in dense_sizes(directory).items() if not variant.is_of_draft(name)}
    return costs_of_shape(variant, mean_expert_bytes(variant, directory), sum(sizes.values()), embedding_bytes(sizes))


def bytes_touched(variant: Variant, directory: StoreDirectory, layers: range) -> tuple[int, int]:
    """Bytes of dense weights, and of experts, that a token needs in some layers, of a directory that has these."""
    sizes = {name: size for name, size in dense_sizes(directory).items() if not variant.is_of_draft(name)}
    embedding = embedding_bytes(sizes)
    is_head = variant.tied_embeddings and layers.stop == variant.num_layers
    dense = sum(sizes.values()) - (0 if is_head else embedding - embedding // variant.vocab_size)
    moe_layers = [layer for layer in variant.layers_with(RoutedExperts) if layer in layers]
    experts = sum(directory.experts_of(layer - layers.start).bytes for layer in moe_layers)
    return dense, experts * variant.experts.per_token


def mean_expert_bytes(variant: Variant, directory: StoreDirectory) -> int:
    """Of an expert; layers may have theirs in different formats."""
    return sum(directory.experts_of(layer).bytes for layer in variant.moe_layers) // len(variant.moe_layers)


def dense_sizes(directory: StoreDirectory) -> dict[str, int]:
    """The size of every dense tensor, but for tables whose rows stay on the disk."""
    return {name: _size(tensor) for name, tensor in directory.tensors.items() if not tensor.is_table}


def table_bytes(directory: StoreDirectory) -> int:
    """Of the tables whose rows stay on the disk."""
    return sum(_size(tensor) for tensor in directory.tensors.values() if tensor.is_table)


def _size(tensor: Tensor) -> int:
    stored: int = sum(span[2] for span in tensor.spans)
    own: int = prod(tensor.shape) * FLOAT_BYTES[tensor.dtype] if tensor.step > 1 else stored
    return own


def embedding_bytes(sizes: dict[str, int]) -> int:
    return sum(size for name, size in sizes.items() if name.startswith("model.embed_tokens."))


def costs_of_shape(variant: Variant, expert_bytes: int, dense_bytes: int, embedding_bytes: int) -> Costs:
    """`expert_bytes` are those of an expert; the mean, where layers differ. A token reads only one row of the
    embedding, unless the embedding is the output matrix too."""
    row = embedding_bytes // variant.vocab_size
    touched = dense_bytes - (0 if variant.tied_embeddings else embedding_bytes - row)
    fixed, growing = variant.state_numbers()
    return {
        "experts": variant.experts.count * len(variant.layers_with(RoutedExperts)),
        "dense_bytes_per_token": touched,
        "expert_bytes_per_token": expert_bytes * variant.experts.per_token * len(variant.layers_with(RoutedExperts)),
        "state_bytes": 4 * fixed,
        "kv_bytes_per_position": 4 * growing,
        "q8_bytes_per_position": growing + 2 * variant.state_heads(),
        "window_bytes_per_position": 4 * variant.window_numbers(),
    }
