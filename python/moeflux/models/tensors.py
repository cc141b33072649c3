"""Which tensors a model has beside its routed experts: canonical names and logical shapes, by variant."""

from __future__ import annotations

from dataclasses import dataclass

from moeflux._core import required_tensors
from moeflux.models.variants import Variant

__all__ = ["DenseShape", "dense_shapes"]


@dataclass(frozen=True)
class DenseShape:
    """`name` is the base name of a matrix ("model.layers.0.mlp.gate") or the full name of a vector."""

    name: str
    shape: tuple[int, ...]
    is_matrix: bool
    is_table: bool = False  # a whole tensor, too, but of rows that are read from the file one by one

    @property
    def tensor(self) -> str:
        """The name of its (first) tensor in a checkpoint."""
        return f"{self.name}.weight" if self.is_matrix else self.name


def dense_shapes(variant: Variant) -> list[DenseShape]:
    """Every tensor that the variant needs. Latent attention in its split form, embed_q and unembed_out."""
    return [DenseShape(*required) for required in required_tensors(variant.to_json())]
