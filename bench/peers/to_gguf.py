"""A qwen3_5_moe store as GGUF, so that llama.cpp runs the same model: python bench/peers/to_gguf.py STORE FILE.gguf

Matrices become Q4_0, which has as many bytes as 4 bits with a scale and a bias for every 64 weights. That rounds the
weights a second time: good for comparing speed, not for comparing text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

from moeflux import Store, Variant, open_store
from moeflux._core import dequantize
from moeflux.floats import decode
from moeflux.store import StoredTensor

QUANTISED = gguf.GGMLQuantizationType.Q4_0


def values(stored: StoredTensor) -> np.ndarray:
    if stored.format.is_affine:
        columns = stored.scales.shape[-1] * stored.format.group_size
        return dequantize(stored.weight, stored.scales, stored.biases, stored.format, columns)
    flat = np.ascontiguousarray(stored.weight).reshape(-1).view(np.uint8)
    return decode(flat, stored.format.element).reshape(stored.weight.shape)


class Converter:
    def __init__(self, store: Store, path: Path) -> None:
        self.store = store
        self.variant: Variant = store.variant
        self.writer = gguf.GGUFWriter(path, "qwen35moe")

    def vector(self, name: str, array: np.ndarray) -> None:
        self.writer.add_tensor(name, np.ascontiguousarray(array, np.float32))

    def matrix(self, name: str, array: np.ndarray) -> None:
        self.writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), QUANTISED), raw_dtype=QUANTISED)

    def get(self, name: str) -> np.ndarray:
        return values(self.store.tensor(name))

    # ---- Header -------------------------------------------------------------------------------------------------

    def header(self) -> None:
        v, w = self.variant, self.writer
        w.add_name(v.name)
        w.add_block_count(v.num_layers)
        w.add_context_length(v.max_context)
        w.add_embedding_length(v.hidden_size)
        w.add_head_count(v.num_heads)
        w.add_head_count_kv(v.num_kv_heads)
        w.add_key_length(v.head_dim)
        w.add_value_length(v.head_dim)
        w.add_rope_freq_base(float(v.rope_theta))
        w.add_rope_dimension_count(v.rotary_dim)
        w.add_rope_dimension_sections([11, 11, 10, 0])
        w.add_layer_norm_rms_eps(v.rms_norm_eps)
        w.add_expert_count(v.num_experts)
        w.add_expert_used_count(v.experts_per_token)
        w.add_expert_feed_forward_length(v.moe_intermediate)
        w.add_expert_shared_feed_forward_length(v.shared_intermediate)
        w.add_ssm_conv_kernel(v.conv_kernel)
        w.add_ssm_state_size(v.linear_key_dim)
        w.add_ssm_group_count(v.linear_key_heads)
        w.add_ssm_time_step_rank(v.linear_value_heads)
        w.add_ssm_inner_size(v.linear_value_heads * v.linear_value_dim)
        w.add_full_attention_interval(v.full_layers[0] + 1)
        # llama.cpp opens nothing without a vocabulary.
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("qwen2")
        w.add_token_list([f"<{token}>" for token in range(v.vocab_size)])
        w.add_token_types([gguf.TokenType.NORMAL] * v.vocab_size)
        w.add_token_merges(["a b"])
        w.add_bos_token_id(0)
        w.add_eos_token_id(0)
        w.add_add_bos_token(False)

    # ---- Tensors ------------------------------------------------------------------------------------------------

    def layer(self, index: int) -> None:
        source, target = f"model.layers.{index}", f"blk.{index}"
        self.vector(f"{target}.attn_norm.weight", self.get(f"{source}.input_layernorm.weight"))
        self.vector(f"{target}.post_attention_norm.weight", self.get(f"{source}.post_attention_layernorm.weight"))
        if index in self.variant.full_layers:
            self.full_attention(f"{source}.self_attn", target)
        else:
            self.delta_net(f"{source}.linear_attn", target)
        self.experts(index, f"{source}.mlp", target)

    def full_attention(self, source: str, target: str) -> None:
        for theirs, ours in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
            self.matrix(f"{target}.attn_{theirs}.weight", self.get(f"{source}.{ours}"))
        for norm in ("q_norm", "k_norm"):
            self.vector(f"{target}.attn_{norm}.weight", self.get(f"{source}.{norm}.weight"))

    def delta_net(self, source: str, target: str) -> None:
        """The value heads of one key head stand together here; there, the first of every key head, then the second."""
        v = self.variant
        heads = np.arange(v.linear_value_heads).reshape(v.linear_key_heads, -1).T.reshape(-1)
        channels = (heads[:, None] * v.linear_value_dim + np.arange(v.linear_value_dim)).reshape(-1)
        keys = 2 * v.linear_key_heads * v.linear_key_dim  # queries and keys come first and keep their places
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

    def experts(self, index: int, source: str, target: str) -> None:
        self.vector(f"{target}.ffn_gate_inp.weight", self.get(f"{source}.gate"))
        self.vector(f"{target}.ffn_gate_inp_shexp.weight", self.get(f"{source}.shared_expert_gate").reshape(-1))
        for name in ("gate", "up", "down"):
            self.matrix(f"{target}.ffn_{name}_shexp.weight", self.get(f"{source}.shared_expert.{name}_proj"))
        stacks: dict[str, list[np.ndarray]] = {"gate": [], "up": [], "down": []}
        for expert in range(self.variant.num_experts):
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
            self.layer(index)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def convert(folder: Path, path: Path) -> None:
    with open_store(folder) as store:
        if store.variant.model_type != "qwen3_5_moe":
            raise SystemExit(f"{folder}: expected a qwen3_5_moe model, found {store.variant.model_type}")
        partial = path.with_name(f"{path.name}.partial")
        Converter(store, partial).run()
        partial.rename(path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
