"""A qwen3_5_moe or deepseek_v3 store as GGUF, so that llama.cpp runs the same model:

    python bench/peers/to_gguf.py STORE FILE.gguf

Matrices become Q4_0, which has as many bytes as 4 bits with a scale and a bias for every 64 weights. That rounds the
weights a second time: good for comparing speed, not for comparing text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moeflux import Store, Variant, open_store
from moeflux._core import dequantize
from moeflux.models.layers import DenseMlp, GatedDelta, GroupedAttention, LatentAttention
from moeflux.stores.floats import decode
from moeflux.stores.store import StoredTensor

QUANTISED = gguf.GGMLQuantizationType.Q4_0
UNPACKED = gguf.GGMLQuantizationType.Q5_0
"""For stacks of a matrix a head: the forms of Q4_0 and its like that llama.cpp makes at loading cannot be multiplied so
(GGML_ASSERT in ggml-backend.cpp), this has no such form."""


def values(stored: StoredTensor) -> np.ndarray:
    if stored.format.is_affine:
        columns = stored.scales.shape[-1] * stored.format.group_size
        stack = stored.weight.shape[:-1]  # rows, or heads and rows
        parts = (each.reshape(-1, each.shape[-1]) for each in (stored.weight, stored.scales, stored.biases))
        return dequantize(*parts, stored.format, columns).reshape(*stack, columns)
    flat = np.ascontiguousarray(stored.weight).reshape(-1).view(np.uint8)
    return decode(flat, stored.format.element).reshape(stored.weight.shape)


class Converter:
    """What both kinds of models have."""

    architecture: str

    def __init__(self, store: Store, path: Path) -> None:
        self.store = store
        self.variant: Variant = store.variant
        self.full = self.first(GroupedAttention, LatentAttention)
        self.writer = gguf.GGUFWriter(path, self.architecture)

    def vector(self, name: str, array: np.ndarray) -> None:
        self.writer.add_tensor(name, np.ascontiguousarray(array, np.float32))

    def matrix(self, name: str, array: np.ndarray) -> None:
        kind = QUANTISED if array.ndim == 2 else UNPACKED
        self.writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)

    def get(self, name: str) -> np.ndarray:
        return values(self.store.tensor(name))

    def first(self, *kinds: type) -> Any:
        """The first part of one of these kinds: all layers that have such a part have the same."""
        layer = self.variant.layers[self.variant.layers_with(*kinds)[0]]
        return layer.mixer if isinstance(layer.mixer, kinds) else layer.feed_forward

    def header(self) -> None:
        v, w = self.variant, self.writer
        w.add_name(v.name)
        w.add_block_count(v.num_layers)
        w.add_context_length(v.max_context)
        w.add_embedding_length(v.hidden_size)
        w.add_head_count(self.full.heads)
        w.add_rope_freq_base(self.full.rope.theta)
        w.add_rope_dimension_count(self.full.rope.dim)
        w.add_layer_norm_rms_eps(v.rms_norm_eps)
        w.add_expert_count(v.experts.count)
        w.add_expert_used_count(v.experts.per_token)
        w.add_expert_feed_forward_length(v.experts.intermediate)
        # llama.cpp opens nothing without a vocabulary.
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("qwen2")
        w.add_token_list([f"<{token}>" for token in range(v.vocab_size)])
        w.add_token_types([gguf.TokenType.NORMAL] * v.vocab_size)
        w.add_token_merges(["a b"])
        w.add_bos_token_id(0)
        w.add_eos_token_id(0)
        w.add_add_bos_token(False)

    def layer(self, index: int, source: str, target: str) -> None:
        raise NotImplementedError

    def feed_forward(self, source: str, target: str, suffix: str) -> None:
        for name in ("gate", "up", "down"):
            self.matrix(f"{target}.ffn_{name}{suffix}.weight", self.get(f"{source}.{name}_proj"))

    def experts(self, index: int, source: str, target: str) -> None:
        self.vector(f"{target}.ffn_gate_inp.weight", self.get(f"{source}.gate"))
        stacks: dict[str, list[np.ndarray]] = {"gate": [], "up": [], "down": []}
        for expert in range(self.variant.experts.count):
            for name, stored in zip(stacks, self.store.expert(index, expert), strict=True):
                stacks[name].append(gguf.quants.quantize(values(stored), QUANTISED))
        for name, stack in stacks.items():
            self.writer.add_tensor(f"{target}.ffn_{name}_exps.weight", np.stack(stack), raw_dtype=QUANTISED)

    def run(self) -> None:
        self.header()
        self.matrix("token_embd.weight", self.get("model.embed_tokens"))
        self.matrix("output.weight", self.get("lm_head"))
        self.vector("output_norm.weight", self.get("model.norm.weight"))
        for index in range(self.variant.num_layers):
            print(f"layer {index} of {self.variant.num_layers}", file=sys.stderr)
            source, target = f"model.layers.{index}", f"blk.{index}"
            self.vector(f"{target}.attn_norm.weight", self.get(f"{source}.input_layernorm.weight"))
            self.layer(index, source, target)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


class Qwen(Converter):
    architecture = "qwen35moe"

    def header(self) -> None:
        super().header()
        w, delta = self.writer, self.first(GatedDelta)
        w.add_head_count_kv(self.full.kv_heads)
        w.add_key_length(self.full.head_dim)
        w.add_value_length(self.full.head_dim)
        w.add_rope_dimension_sections([11, 11, 10, 0])
        w.add_expert_shared_feed_forward_length(self.variant.experts.shared.intermediate)
        w.add_ssm_conv_kernel(delta.taps)
        w.add_ssm_state_size(delta.key_dim)
        w.add_ssm_group_count(delta.key_heads)
        w.add_ssm_time_step_rank(delta.value_heads)
        w.add_ssm_inner_size(delta.value_width)
        w.add_full_attention_interval(self.variant.layers_with(GroupedAttention)[0] + 1)

    def layer(self, index: int, source: str, target: str) -> None:
        self.vector(f"{target}.post_attention_norm.weight", self.get(f"{source}.post_attention_layernorm.weight"))
        if index in self.variant.layers_with(GroupedAttention):
            self.full_attention(f"{source}.self_attn", target)
        else:
            self.delta_net(f"{source}.linear_attn", target)
        self.vector(f"{target}.ffn_gate_inp_shexp.weight", self.get(f"{source}.mlp.shared_expert_gate").reshape(-1))
        self.feed_forward(f"{source}.mlp.shared_expert", target, "_shexp")
        self.experts(index, f"{source}.mlp", target)

    def full_attention(self, source: str, target: str) -> None:
        for theirs, ours in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
            self.matrix(f"{target}.attn_{theirs}.weight", self.get(f"{source}.{ours}"))
        for norm in ("q_norm", "k_norm"):
            self.vector(f"{target}.attn_{norm}.weight", self.get(f"{source}.{norm}.weight"))

    def delta_net(self, source: str, target: str) -> None:
        """The value heads of one key head stand together here; there, the first of every key head, then the second."""
        d = self.first(GatedDelta)
        heads = np.arange(d.value_heads).reshape(d.key_heads, -1).T.reshape(-1)
        channels = (heads[:, None] * d.value_dim + np.arange(d.value_dim)).reshape(-1)
        keys = 2 * d.key_width  # queries and keys come first and keep their places
        mixed = np.concatenate([np.arange(keys), keys + channels])
        self.matrix(f"{target}.attn_qkv.weight", self.get(f"{source}.in_proj_qkv")[mixed])
        self.matrix(f"{target}.attn_gate.weight", self.get(f"{source}.in_proj_z")[channels])
        self.matrix(f"{target}.ssm_out.weight", self.get(f"{source}.out_proj")[:, channels])
        self.matrix(f"{target}.ssm_alpha.weight", self.get(f"{source}.in_proj_a")[heads])
        self.matrix(f"{target}.ssm_beta.weight", self.get(f"{source}.in_proj_b")[heads])
        self.vector(f"{target}.ssm_conv1d.weight", self.get(f"{source}.conv1d.weight")[mixed, :, 0])
        self.vector(f"{target}.ssm_a", -np.exp(self.get(f"{source}.A_log")[heads]))
        self.vector(f"{target}.ssm_dt.bias", self.get(f"{source}.dt_bias")[heads])
        self.vector(f"{target}.ssm_norm.weight", self.get(f"{source}.norm.weight"))


class DeepSeek(Converter):
    """Attention in the latent space: the two halves of kv_b stand by themselves, as in the store."""

    architecture = "deepseek2"

    def header(self) -> None:
        super().header()
        v, w, a = self.variant, self.writer, self.full
        experts, router, yarn = v.experts, v.experts.router, a.rope.yarn
        w.add_head_count_kv(1)
        w.add_key_length(a.kv_rank + a.rope.dim)
        w.add_value_length(a.kv_rank)
        w.add_key_length_mla(a.head_dim)
        w.add_value_length_mla(a.v_dim)
        w.add_q_lora_rank(a.q_rank)
        w.add_kv_lora_rank(a.kv_rank)
        w.add_leading_dense_block_count(v.moe_layers[0])
        w.add_feed_forward_length(self.first(DenseMlp).intermediate)
        w.add_expert_shared_count(experts.shared.intermediate // experts.intermediate)
        w.add_expert_weights_scale(router.scaling)
        w.add_expert_weights_norm(router.normalize)
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        w.add_expert_group_count(router.groups)
        w.add_expert_group_used_count(router.groups_kept)
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(yarn.factor)
        w.add_rope_scaling_orig_ctx_len(yarn.original_context)
        w.add_rope_scaling_yarn_log_mul(0.1 * yarn.mscale_all_dim)

    def layer(self, index: int, source: str, target: str) -> None:
        attention = f"{source}.self_attn"
        for theirs, ours in (
            ("attn_q_a", "q_a_proj"),
            ("attn_q_b", "q_b_proj"),
            ("attn_kv_a_mqa", "kv_a_proj_with_mqa"),
            ("attn_k_b", "embed_q"),
            ("attn_v_b", "unembed_out"),
            ("attn_output", "o_proj"),
        ):
            self.matrix(f"{target}.{theirs}.weight", self.get(f"{attention}.{ours}"))
        for norm in ("q_a", "kv_a"):
            self.vector(f"{target}.attn_{norm}_norm.weight", self.get(f"{attention}.{norm}_layernorm.weight"))
        self.vector(f"{target}.ffn_norm.weight", self.get(f"{source}.post_attention_layernorm.weight"))
        if index not in self.variant.moe_layers:
            self.feed_forward(f"{source}.mlp", target, "")
            return
        self.vector(f"{target}.exp_probs_b.bias", self.get(f"{source}.mlp.gate.e_score_correction_bias"))
        self.feed_forward(f"{source}.mlp.shared_experts", target, "_shexp")
        self.experts(index, f"{source}.mlp", target)


CONVERTERS = {"qwen3_5_moe": Qwen, "deepseek_v3": DeepSeek}


def convert(folder: Path, path: Path) -> None:
    with open_store(folder) as store:
        if store.variant.model_type not in CONVERTERS:
            raise SystemExit(f"{folder}: expected {' or '.join(CONVERTERS)}, found {store.variant.model_type}")
        partial = path.with_name(f"{path.name}.partial")
        CONVERTERS[store.variant.model_type](store, partial).run()
        partial.rename(path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
