"""GGUF files of tiny checkpoints, written with the package gguf as llama.cpp's converter names and orders things.

`write(name, path)` takes a checkpoint of tests/golden. What it knows of names and orders is written down from the
converter, as a second opinion on csrc/format/gguf_names.cpp and gguf_order.cpp. `make peers` runs the converter itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from golden.checkpoint import Checkpoint
from golden.checkpoints import CHECKPOINTS
from golden.elements import from_bf16, to_bf16
from golden.gemma4 import sizes_of
from support.gguf_tokens import add_tokenizer

Tensors = dict[str, np.ndarray]
Type = gguf.GGMLQuantizationType

WORDS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b", "self_attn.v_b_proj": "attn_v_b", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "eh_proj": "nextn.eh_proj", "router.proj": "ffn_gate_inp", "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    **{f"post_feedforward_layernorm{s}": f"post_ffw_norm{s}" for s in ("", "_1", "_2")},
    **{f"mlp.shared_expert{s}.{part}_proj": f"ffn_{part}_shexp" for s in ("", "s") for part in ("gate", "up", "down")},
}  # fmt: skip
WHOLE = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias", "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
OUTSIDE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "rope_freqs": "rope_freqs",
}  # fmt: skip
PLAIN = ("gate_proj", "up_proj", "down_proj")
AS_NORM = ("qwen3next", "qwen35moe", "glm4moe", "gpt-oss", "gemma4")
"""Architectures that call the norm before experts by what it comes after."""


def numbers(checkpoint: Checkpoint) -> Tensors:
    """f32, by the published names, without what no text needs."""
    decode = {"BF16": from_bf16, "F16": lambda a: a.astype(np.float32), "F32": lambda a: a, "U8": lambda a: a}
    made = {name: decode[dtype](array) for name, (dtype, array) in checkpoint.tensors.items()}
    made = {name.replace("model.language_model.", "model."): array for name, array in made.items()}
    return {name: array for name, array in made.items() if not name.startswith(("mtp.", "model.visual.", "model.mtp."))}


def stack(tensors: Tensors, layers: int, experts: int, at: str = "mlp", words: tuple[str, ...] = PLAIN) -> None:
    """One tensor for all experts of a layer."""
    for layer in range(layers):
        prefix = f"model.layers.{layer}.{at}.experts"
        if f"{prefix}.0.{words[0]}.weight" not in tensors:
            continue  # a dense layer
        for own, word in zip(PLAIN, words, strict=True):
            each = [tensors.pop(f"{prefix}.{expert}.{word}.weight") for expert in range(experts)]
            tensors[f"model.layers.{layer}.mlp.experts.{own}.weight"] = np.stack(each)


def renamed(tensors: Tensors, architecture: str) -> Tensors:
    made = {}
    for name, array in tensors.items():
        base, _, part = name.rpartition(".")
        if base in OUTSIDE:
            made[f"{OUTSIDE[base]}.{part}"] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest in WHOLE:
            made[f"blk.{layer}.{WHOLE[rest]}"] = array
            continue
        rest = f"{rest}.weight" if rest.endswith("sinks") else rest
        own = WORDS[rest.rpartition(".")[0]]
        if rest == "post_attention_layernorm.weight" and architecture in AS_NORM:
            own = "post_attention_norm"
        made[f"blk.{layer}.{own}.{rest.rpartition('.')[2]}"] = array
    return made


def common(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What the converter writes of every model, where the config has it."""
    rope = {**(config.get("rope_scaling") or {}), **config.get("rope_parameters", {})}
    rope.setdefault("rope_theta", config.get("rope_theta"))
    head_dim = config.get("head_dim")
    counts = [config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config]
    given: list[tuple[Callable[[Any], None], Any]] = [
        (writer.add_block_count, config["num_hidden_layers"]),
        (writer.add_context_length, config["max_position_embeddings"]),
        (writer.add_embedding_length, config["hidden_size"]),
        (writer.add_feed_forward_length, config.get("intermediate_size")),
        (writer.add_head_count, config["num_attention_heads"]),
        (writer.add_head_count_kv, config["num_key_value_heads"]),
        (writer.add_rope_freq_base, rope["rope_theta"]),
        (writer.add_layer_norm_rms_eps, config["rms_norm_eps"]),
        (writer.add_expert_count, counts[0]),
        (writer.add_expert_used_count, config["num_experts_per_tok"]),
        (writer.add_expert_group_count, config.get("n_group")),
        (writer.add_expert_group_used_count, config.get("topk_group")),
        (writer.add_key_length, head_dim),
        (writer.add_value_length, head_dim),
        (writer.add_expert_feed_forward_length, config.get("moe_intermediate_size")),
        (writer.add_expert_shared_feed_forward_length, config.get("shared_expert_intermediate_size")),
        (writer.add_file_type, gguf.LlamaFileType.MOSTLY_BF16),
    ]  # fmt: skip
    if (scoring := config.get("scoring_func")) is not None:
        kinds = {"sigmoid": gguf.ExpertGatingFuncType.SIGMOID, "softmax": gguf.ExpertGatingFuncType.SOFTMAX}
        given.append((writer.add_expert_gating_func, kinds[scoring]))
    if rope.get("rope_type", rope.get("type")) == "yarn":
        given += [
            (writer.add_rope_scaling_type, gguf.RopeScalingType.YARN),
            (writer.add_rope_scaling_factor, rope["factor"]),
            (writer.add_rope_scaling_orig_ctx_len, rope["original_max_position_embeddings"]),
            (writer.add_rope_scaling_yarn_beta_fast, rope["beta_fast"]),
            (writer.add_rope_scaling_yarn_beta_slow, rope["beta_slow"]),
        ]
    for add, number in given:
        if number is not None:
            add(number)


# ---- Families ---------------------------------------------------------------------------------------------------


def qwen(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> Tensors:
    """qwen3_moe, qwen2_moe and olmoe: as they are."""
    config, tensors = checkpoint.config, numbers(checkpoint)
    common(writer, config)
    stack(tensors, config["num_hidden_layers"], config["num_experts"])
    return tensors


def hybrid(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> Tensors:
    """qwen3_next and qwen3_5_moe: norms are whole, decays are computed, value heads of the second take turns."""
    config = checkpoint.config.get("text_config", checkpoint.config)
    tensors = numbers(checkpoint)
    common(writer, config)
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(key_dim)
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * value_dim)
    writer.add_full_attention_interval(config["full_attention_interval"])
    rope = config.get("rope_parameters", config)
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    stack(tensors, config["num_hidden_layers"], config["num_experts"])
    made = {}
    for name, array in tensors.items():
        at, _, part = name.rpartition(".experts.")
        if name.endswith(".in_proj_qkvz.weight"):
            each = values // keys * value_dim
            heads = array.reshape(keys, 2 * key_dim + 2 * each, -1)
            q, k, v, z = (
                part.reshape(-1, array.shape[1])
                for part in np.split(heads, [key_dim, 2 * key_dim, 2 * key_dim + each], axis=1)
            )
            at = name.removesuffix("in_proj_qkvz.weight")
            made |= {f"{at}in_proj_qkv.weight": np.concatenate([q, k, v]), f"{at}in_proj_z.weight": z}
        elif part == "gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            made |= {f"{at}.experts.gate_proj.weight": gate, f"{at}.experts.up_proj.weight": up}
        elif part == "down_proj":
            made[f"{name}.weight"] = array
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            made[name] = array + np.float32(1)
        elif name.endswith("conv1d.weight"):
            made[name] = array[:, 0]
        else:
            made[name] = -np.exp(array) if name.endswith(".A_log") else array
    if checkpoint.config["model_type"] != "qwen3_next":
        taking_turns(made, keys, values, key_dim, value_dim)
    return made


def taking_turns(tensors: Tensors, keys: int, values: int, key_dim: int, value_dim: int) -> None:
    """In place: value heads in the order first of each key head, second of each, ..."""
    order = np.arange(values).reshape(keys, values // keys).T.reshape(-1)
    wide = (order[:, None] * value_dim + np.arange(value_dim)).reshape(-1)
    channels = np.concatenate([np.arange(2 * keys * key_dim), 2 * keys * key_dim + wide])
    for name in tensors:
        if ".linear_attn." not in name:
            continue
        if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
            tensors[name] = tensors[name][channels]
        elif name.endswith(".in_proj_z.weight"):
            tensors[name] = tensors[name][wide]
        elif name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
            tensors[name] = tensors[name][order]
        elif name.endswith(".out_proj.weight"):
            tensors[name] = tensors[name][:, wide]


def mixtral(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> Tensors:
    """Channels of a head that turn together lie side by side."""
    config, tensors = checkpoint.config, numbers(checkpoint)
    common(writer, config)
    stack(tensors, config["num_hidden_layers"], config["num_local_experts"], "block_sparse_moe", ("w1", "w3", "w2"))
    for name, array in tensors.items():
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            tensors[name] = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return tensors


def minimax(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> Tensors:
    config, tensors = checkpoint.config, numbers(checkpoint)
    common(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(config["rotary_dim"])
    stack(tensors, config["num_hidden_layers"], config["num_local_experts"], "block_sparse_moe", ("w1", "w3", "w2"))
    return tensors


def deepseek_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)


def glm4_moe(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> Tensors:
    """With the layer for multi-token prediction that follows the last."""
    config, tensors = checkpoint.config, numbers(checkpoint)
    layers = config["num_hidden_layers"]
    common(writer, config | {"num_hidden_layers": layers + 1})
    deepseek_experts(writer, config)
    writer.add_nextn_predict_layers(1)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    stack(tensors, layers, config["n_routed_experts"])
    return tensors


def deepseek(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> Tensors:
    """kv_b in two parts, of which the one for keys is transposed."""
    config, tensors = checkpoint.config, numbers(checkpoint)
    common(writer, config | {"num_key_value_heads": 1})
    deepseek_experts(writer, config)
    rank, nope, turning = config["kv_lora_rank"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turning)
    writer.add_value_length(rank)
    writer.add_key_length_mla(nope + turning)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turning)
    if (scale := (config.get("rope_scaling") or {}).get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)
    stack(tensors, config["num_hidden_layers"], config["n_routed_experts"])
    made = {}
    for name, array in tensors.items():
        if name.endswith(".kv_b_proj.weight"):
            both = array.reshape(config["num_attention_heads"], -1, rank)
            made[name.replace("kv_b", "k_b")] = np.ascontiguousarray(both[:, :nope].swapaxes(1, 2))
            made[name.replace("kv_b", "v_b")] = np.ascontiguousarray(both[:, nope:])
        else:
            made[name] = array
    behind = f"model.layers.{config['num_hidden_layers']}."
    return {name: array for name, array in made.items() if not name.startswith(behind) and ".rotary_emb" not in name}


def gpt_oss(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> Tensors:
    """Rows of gate and up apart. Blocks of MXFP4 have their scale first, and halves of a block share bytes."""
    config, tensors = checkpoint.config, numbers(checkpoint)
    common(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    made = {}
    for name, array in tensors.items():
        at, _, part = name.rpartition(".mlp.experts.")
        if not at:
            made[name] = array
        elif part.endswith("_bias"):
            rows = (
                {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
                if "gate_up" in part
                else {"down_proj": slice(None)}
            )
            made |= {f"{at}.mlp.experts.{own}.bias": np.ascontiguousarray(array[:, each]) for own, each in rows.items()}
        elif part.endswith("_blocks"):
            codes = np.stack([array & 15, array >> 4], axis=-1).reshape(*array.shape[:-1], 32)
            scales = tensors[name.replace("_blocks", "_scales")][..., None]
            blocks = np.concatenate([scales, codes[..., :16] | codes[..., 16:] << 4], axis=-1)
            blocks = blocks.reshape(*blocks.shape[:2], -1)
            rows = (
                {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
                if "gate_up" in part
                else {"down_proj": slice(None)}
            )
            made |= {
                f"{at}.mlp.experts.{own}.weight": np.ascontiguousarray(blocks[:, each]) for own, each in rows.items()
            }
    return made


def gemma4(writer: gguf.GGUFWriter, checkpoint: Checkpoint) -> Tensors:
    """Values of layers that see everything, and with _swa those of layers that see a window. What turns of a head is
    said by divisors of angles."""
    config, tensors = checkpoint.config.get("text_config", checkpoint.config), numbers(checkpoint)
    ropes, windows = config["rope_parameters"], [kind == "sliding_attention" for kind in config["layer_types"]]
    layer = windows.index(False)
    sizes = {True: (config["head_dim"], config["num_key_value_heads"]), False: sizes_of(config, layer)}
    said = {"head_dim": sizes[False][0], "num_experts_per_tok": config["top_k_experts"], "rope_parameters": {}}
    said["rope_theta"] = ropes["full_attention"]["rope_theta"]
    common(writer, config | said | {"num_key_value_heads": [sizes[window][1] for window in windows]})
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windows)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(sizes[False][0])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    divisors = np.full(sizes[False][0] // 2, 1e30, np.float32)
    divisors[: int(len(divisors) * ropes["full_attention"]["partial_rotary_factor"])] = 1
    return {"rope_freqs.weight": divisors, **tensors}


FAMILIES: dict[str, tuple[str, Callable[[gguf.GGUFWriter, Checkpoint], Tensors]]] = {
    "qwen3_moe": ("qwen3moe", qwen),
    "qwen2_moe": ("qwen2moe", qwen),
    "olmoe": ("olmoe", qwen),
    "qwen3_next": ("qwen3next", hybrid),
    "qwen3_5_moe": ("qwen35moe", hybrid),
    "mixtral": ("llama", mixtral),
    "minimax_m2": ("minimax-m2", minimax),
    "glm4_moe": ("glm4moe", glm4_moe),
    "deepseek_v3": ("deepseek2", deepseek),
    "deepseek_v2": ("deepseek2", deepseek),
    "glm4_moe_lite": ("deepseek2", deepseek),
    "gpt_oss": ("gpt-oss", gpt_oss),
    "gemma4": ("gemma4", gemma4),
    "gemma4_other": ("gemma4", gemma4),
}
"""Name of a checkpoint -> architecture, and what writes its values and makes its tensors."""
CHANGED = frozenset({"qwen3_next", "qwen3_5_moe"})
"""Those whose decays are written as another number."""


def write(
    name: str,
    path: Path,
    *,
    type: str = "BF16",
    others: dict[str, str] | None = None,
    parts: int = 0,
    tokens: bool = True,
    change: Callable[[gguf.GGUFWriter, Tensors], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Path:
    """The checkpoint of that name, or another of its family. Matrices in that type where their columns fit it, else in
    BF16; vectors and routers in F32. `others` are tensors of another type, or of which `change` made blocks. With
    `parts`, the file is cut into several of at most so many tensors. `change` may add values and change tensors."""
    path.parent.mkdir(exist_ok=True)
    architecture, make = FAMILIES[name]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=parts)
    writer.add_name(f"tiny {name}")
    writer.add_type("model")
    tensors = renamed(make(writer, checkpoint or checkpoint_of(name)), architecture)
    if tokens:
        add_tokenizer(writer)
    if change:
        change(writer, tensors)
    for tensor, array in tensors.items():
        add(writer, tensor, array, type, (others or {}).get(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@lru_cache(maxsize=4)
def checkpoint_of(name: str) -> Checkpoint:
    """No `change` may change it: what it changes are copies, or is refused."""
    made = CHECKPOINTS[name]()
    for _, array in made.tensors.values():
        array.flags.writeable = False
    return made


def add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, type: str, own: str | None) -> None:
    if array.dtype == np.uint8:
        writer.add_tensor(name, array, raw_dtype=Type[own or "MXFP4"])
        return
    kind = Type[own or type]
    if not own and is_narrow(name, array):
        kind = Type.F32
    elif array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Type.BF16
    writer.add_tensor(name, stored(array, kind), raw_dtype=kind)


def stored(array: np.ndarray, kind: Type) -> np.ndarray:
    if kind is Type.F32:
        return array.astype(np.float32)
    if kind is Type.BF16:  # the package takes a hundred times as long
        return np.ascontiguousarray(to_bf16(array)).view(np.uint8)
    return gguf.quants.quantize(array, kind)


def is_narrow(name: str, array: np.ndarray) -> bool:
    """Vectors and what else the converter leaves in F32."""
    return array.ndim < 2 or name.endswith((".bias", ".scale")) or ".ffn_gate_inp" in name or "conv1d" in name
