"""Which tensors a model has beside its routed experts: canonical names and logical shapes, by variant."""

from __future__ import annotations

from dataclasses import dataclass

from moeflux.variants import Variant

__all__ = ["DenseShape", "dense_shapes"]


@dataclass(frozen=True)
class DenseShape:
    """`name` is the base name of a matrix ("model.layers.0.mlp.gate") or the full name of a vector."""

    name: str
    shape: tuple[int, ...]
    is_matrix: bool

    @property
    def tensor(self) -> str:
        """The name of its (first) tensor in a checkpoint."""
        return f"{self.name}.weight" if self.is_matrix else self.name


def dense_shapes(v: Variant) -> list[DenseShape]:
    """Every tensor that the variant needs. Latent attention in its split form, embed_q and unembed_out."""
    result: list[DenseShape] = []

    def matrix(name: str, *shape: int) -> None:
        result.append(DenseShape(name, shape, True))

    def vector(name: str, *shape: int) -> None:
        result.append(DenseShape(name, shape, False))

    def feed_forward(prefix: str, width: int) -> None:
        matrix(f"{prefix}.gate_proj", width, v.hidden_size)
        matrix(f"{prefix}.up_proj", width, v.hidden_size)
        matrix(f"{prefix}.down_proj", v.hidden_size, width)

    def linear_attention(prefix: str) -> None:
        matrix(f"{prefix}.in_proj_qkv", v.conv_channels, v.hidden_size)
        matrix(f"{prefix}.in_proj_z", v.linear_total_value, v.hidden_size)
        matrix(f"{prefix}.in_proj_a", v.linear_value_heads, v.hidden_size)
        matrix(f"{prefix}.in_proj_b", v.linear_value_heads, v.hidden_size)
        matrix(f"{prefix}.out_proj", v.hidden_size, v.linear_total_value)
        vector(f"{prefix}.conv1d.weight", v.conv_channels, v.conv_kernel, 1)
        vector(f"{prefix}.A_log", v.linear_value_heads)
        vector(f"{prefix}.dt_bias", v.linear_value_heads)
        vector(f"{prefix}.norm.weight", v.linear_value_dim)

    def grouped_attention(prefix: str) -> None:
        matrix(f"{prefix}.q_proj", v.q_proj_out, v.hidden_size)
        matrix(f"{prefix}.k_proj", v.kv_dim, v.hidden_size)
        matrix(f"{prefix}.v_proj", v.kv_dim, v.hidden_size)
        matrix(f"{prefix}.o_proj", v.hidden_size, v.o_proj_in)
        vector(f"{prefix}.q_norm.weight", v.head_dim)
        vector(f"{prefix}.k_norm.weight", v.head_dim)

    def latent_attention(prefix: str) -> None:
        queries = v.num_heads * v.head_dim
        if v.q_lora_rank:
            matrix(f"{prefix}.q_a_proj", v.q_lora_rank, v.hidden_size)
            vector(f"{prefix}.q_a_layernorm.weight", v.q_lora_rank)
            matrix(f"{prefix}.q_b_proj", queries, v.q_lora_rank)
        else:
            matrix(f"{prefix}.q_proj", queries, v.hidden_size)
        matrix(f"{prefix}.kv_a_proj_with_mqa", v.kv_a_out, v.hidden_size)
        vector(f"{prefix}.kv_a_layernorm.weight", v.kv_lora_rank)
        matrix(f"{prefix}.embed_q", v.num_heads, v.kv_lora_rank, v.qk_nope_dim)
        matrix(f"{prefix}.unembed_out", v.num_heads, v.v_head_dim, v.kv_lora_rank)
        matrix(f"{prefix}.o_proj", v.hidden_size, v.o_proj_in)

    def experts_side(prefix: str) -> None:
        matrix(f"{prefix}.gate", v.num_experts, v.hidden_size)
        if v.router == "noaux_tc":
            vector(f"{prefix}.gate.e_score_correction_bias", v.num_experts)
        if v.shared_expert == "gated":
            feed_forward(f"{prefix}.shared_expert", v.shared_intermediate)
            matrix(f"{prefix}.shared_expert_gate", 1, v.hidden_size)
        elif v.shared_expert == "plain":
            feed_forward(f"{prefix}.shared_experts", v.shared_intermediate)

    matrix("model.embed_tokens", v.vocab_size, v.hidden_size)
    vector("model.norm.weight", v.hidden_size)
    if not v.tied_embeddings:
        matrix("lm_head", v.vocab_size, v.hidden_size)
    for layer, (kind, mlp) in enumerate(zip(v.layer_kinds, v.mlp_kinds, strict=True)):
        prefix = f"model.layers.{layer}"
        vector(f"{prefix}.input_layernorm.weight", v.hidden_size)
        vector(f"{prefix}.post_attention_layernorm.weight", v.hidden_size)
        if kind == "linear":
            linear_attention(f"{prefix}.linear_attn")
        elif v.attention == "mla":
            latent_attention(f"{prefix}.self_attn")
        else:
            grouped_attention(f"{prefix}.self_attn")
        if mlp == "moe":
            experts_side(f"{prefix}.mlp")
        else:
            feed_forward(f"{prefix}.mlp", v.dense_intermediate)
    return result
