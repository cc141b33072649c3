"""Tiny stores of random bytes for tests of the readers: right in every shape, and easy to get wrong on purpose.

`shapes(variant)` is written down from the format's description, as a second opinion on the C++ list.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moeflux import Variant
from moeflux.models.layers import (
    ClampedSwiglu,
    DenseMlp,
    GatedDelta,
    GroupedAttention,
    Index,
    LatentAttention,
    Layer,
    Rope,
    RoutedExperts,
    Router,
    SharedExpert,
    Yarn,
)
from support.flat import flat

BYTES = {"U8": 1, "U32": 4, "BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "I64": 8}


class Raw(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def raw(name: str, dtype: str, shape: tuple[int, ...]) -> Raw:
    """Bytes that depend on the name, so that no two tensors are alike."""
    seed = [ord(c) for c in name]
    return Raw(dtype, shape, np.random.default_rng(seed).bytes(int(np.prod(shape)) * BYTES[dtype]))


def quantised(
    name: str, shape: tuple[int, ...], bits: int = 4, group: int = 32, scales: str = "BF16"
) -> dict[str, Raw]:
    *rows, columns = shape
    return {
        f"{name}.weight": raw(f"{name}.weight", "U32", (*rows, columns * bits // 32)),
        f"{name}.scales": raw(f"{name}.scales", scales, (*rows, columns // group)),
        f"{name}.biases": raw(f"{name}.biases", scales, (*rows, columns // group)),
    }


# ---- Variants ---------------------------------------------------------------------------------------------------


def hybrid(model_type: str = "qwen3_next", **changes: Any) -> Variant:
    """Two linear layers and a full one, all with experts and a gated shared one."""
    fields: dict[str, Any] = {
        "name": "tiny hybrid",
        "model_type": model_type,
        "attention": "gqa",
        "rope": "vanilla",
        "router": "softmax",
        "shared_expert": "gated",
        "attention_gate": True,
        "layer_kinds": ("linear", "full", "linear"),
        "mlp_kinds": ("moe",) * 3,
        "hidden_size": 64,
        "vocab_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rotary_dim": 4,
        "rope_theta": 1e6,
        "linear_key_heads": 2,
        "linear_value_heads": 6,
        "linear_key_dim": 8,
        "linear_value_dim": 16,
        "conv_kernel": 4,
        "num_experts": 4,
        "experts_per_token": 2,
        "moe_intermediate": 32,
        "shared_intermediate": 96,
    }
    return flat(**(fields | changes))


OLD = hybrid("qwen3_5_moe", moe_intermediate=64)
"""Of which folders are made as the older engine packed them, in groups of 64."""
OLD_EXPERT = 3 * (64 * 64 // 2 + 2 * 64 * 2)  # bytes, of 4 bits: hidden and intermediate size are 64
OLD_EXPERT_2BIT = 3 * (64 * 64 // 4 + 2 * 64 * 2)


def latent(**changes: Any) -> Variant:
    """A dense layer and two with experts, all with latent attention."""
    fields: dict[str, Any] = {
        "name": "tiny latent",
        "model_type": "deepseek_v3",
        "attention": "mla",
        "rope": "vanilla",
        "router": "noaux_tc",
        "shared_expert": "plain",
        "layer_kinds": ("full",) * 3,
        "mlp_kinds": ("dense", "moe", "moe"),
        "hidden_size": 64,
        "vocab_size": 48,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 48,
        "rotary_dim": 16,
        "rope_theta": 1e4,
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_nope_dim": 32,
        "qk_rope_dim": 16,
        "v_head_dim": 32,
        "num_experts": 4,
        "experts_per_token": 2,
        "moe_intermediate": 32,
        "shared_intermediate": 32,
        "dense_intermediate": 128,
        "num_groups": 2,
        "groups_per_token": 1,
    }
    return flat(**(fields | changes))


def glm(**changes: Any) -> Variant:
    """A dense layer and one with experts, all with grouped attention that has biases; half of each head turns."""
    fields: dict[str, Any] = {
        "name": "tiny glm",
        "model_type": "glm4_moe",
        "attention": "gqa",
        "rope": "vanilla",
        "router": "noaux_tc",
        "shared_expert": "plain",
        "layer_kinds": ("full",) * 2,
        "mlp_kinds": ("dense", "moe"),
        "hidden_size": 64,
        "vocab_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "rope_theta": 1e6,
        "num_experts": 4,
        "experts_per_token": 2,
        "moe_intermediate": 32,
        "shared_intermediate": 32,
        "dense_intermediate": 96,
        "num_groups": 1,
        "groups_per_token": 1,
    }
    return flat(**(fields | changes)).with_parts(GroupedAttention, bias=True)


def minimax(**changes: Any) -> Variant:
    """Layers with experts alone, whose q heads are normed as one and whose k heads are."""
    layers = {"mlp_kinds": ("moe",) * 2, "shared_expert": "none", "shared_intermediate": 0, "dense_intermediate": 0}
    v = glm(name="tiny minimax", model_type="minimax_m2", **layers | changes)
    return v.with_parts(GroupedAttention, bias=False, joint_norm=True)


def deepseek_v2(**changes: Any) -> Variant:
    """A softmax router keeps to the best of its groups of two."""
    fields = {"model_type": "deepseek_v2", "router": "softmax", "num_groups": 0, "groups_per_token": 0}
    v = latent(name="tiny deepseek_v2", **fields | changes)
    return v.with_parts(Router, normalize=False, scaling=16.0, groups=v.experts.count // 2, groups_kept=1)


def deepseek_v32(count: int = 5, **changes: Any) -> Variant:
    """An index selects so many rows."""
    index = Index(heads=4, dim=24, count=count)
    fields = {"name": "tiny deepseek_v32", "model_type": "deepseek_v3", **changes}
    v = latent(**fields).with_parts(LatentAttention, index=index)
    return dataclasses.replace(v, model_type="deepseek_v32")


def gpt_oss(**changes: Any) -> Variant:
    """A layer that sees a window and one that sees everything, both with experts; biases and sinks everywhere."""
    yarn = Yarn(factor=32.0, original_context=8, beta_fast=32.0, beta_slow=1.0, truncate=False)
    everything = GroupedAttention(
        heads=4, kv_heads=2, head_dim=32, rope=Rope(dim=32, theta=150_000.0, yarn=yarn), qk_norm=False, bias=True,
        out_bias=True, sinks=True,
    )  # fmt: skip
    experts = RoutedExperts(
        count=changes.pop("num_experts", 4), per_token=2, intermediate=32, router=Router(scoring="softmax", bias=True),
        bias=True, clamped=ClampedSwiglu(alpha=1.702, limit=1.0),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "name": "tiny gpt_oss",
        "model_type": "gpt_oss",
        "layers": (Layer(dataclasses.replace(everything, window=5), experts), Layer(everything, experts)),
        "hidden_size": 64,
        "vocab_size": 48,
        "rms_norm_eps": 1e-5,
        "max_context": 1024,
    }
    return Variant(**(fields | changes))


def gemma4(**changes: Any) -> Variant:
    """A layer that sees a window and one that sees everything, with heads of two sizes; a framed mixture in both."""
    windowed = GroupedAttention(
        heads=4, kv_heads=2, head_dim=32, rope=Rope(dim=32, theta=1e4), window=5, scale=1.0, value_norm=True,
        out_norm=True,
    )  # fmt: skip
    everything = dataclasses.replace(
        windowed, kv_heads=1, head_dim=64, rope=Rope(dim=64, theta=1e6, turning=8), window=0, keys_as_values=True
    )
    experts = RoutedExperts(
        count=changes.pop("num_experts", 4), per_token=2, intermediate=32,
        router=Router(scoring="softmax", factors=True), shared=SharedExpert(intermediate=96), geglu=True, framed=True,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "name": "tiny gemma4",
        "model_type": "gemma4",
        "layers": (Layer(windowed, experts), Layer(everything, experts)),
        "hidden_size": 64,
        "vocab_size": 48,
        "rms_norm_eps": 1e-6,
        "max_context": 1024,
        "tied_embeddings": True,
        "embedding_scale": 8.0,
        "logit_cap": 5.0,
    }
    return Variant(**(fields | changes))


# ---- Tensors ----------------------------------------------------------------------------------------------------


def shapes(v: Variant, split_kv: bool = False) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """(matrices and stacks by base name with their logical shape, plain tensors by name), routed experts aside."""
    h = v.hidden_size
    matrices: dict[str, tuple[int, ...]] = {"model.embed_tokens": (v.vocab_size, h)}
    plain: dict[str, tuple[int, ...]] = {"model.norm.weight": (h,)}
    if not v.tied_embeddings:
        matrices["lm_head"] = (v.vocab_size, h)
    for i, layer in enumerate(v.layers):
        at, mixer, rest = f"model.layers.{i}", layer.mixer, layer.feed_forward
        plain |= {f"{at}.input_layernorm.weight": (h,), f"{at}.post_attention_layernorm.weight": (h,)}
        if isinstance(mixer, GatedDelta):
            key, value = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
            la = f"{at}.linear_attn"
            matrices |= {f"{la}.in_proj_qkv": (2 * key + value, h), f"{la}.in_proj_z": (value, h)}
            matrices |= {f"{la}.in_proj_{x}": (mixer.value_heads, h) for x in "ab"}
            matrices[f"{la}.out_proj"] = (h, value)
            plain[f"{la}.conv1d.weight"] = (2 * key + value, mixer.taps, 1)
            plain |= {f"{la}.{x}": (mixer.value_heads,) for x in ("A_log", "dt_bias")}
            plain[f"{la}.norm.weight"] = (mixer.value_dim,)
        elif isinstance(mixer, GroupedAttention):
            sa, kv = f"{at}.self_attn", mixer.kv_heads * mixer.head_dim
            heads = mixer.heads * mixer.head_dim
            matrices |= {f"{sa}.q_proj": (heads * (1 + mixer.gate), h), f"{sa}.o_proj": (h, heads)}
            matrices |= {f"{sa}.{x}_proj": (kv, h) for x in ("k" if mixer.keys_as_values else "kv")}
            if mixer.qk_norm:
                normed = {"q": heads, "k": kv} if mixer.joint_norm else dict.fromkeys("qk", mixer.head_dim)
                plain |= {f"{sa}.{x}_norm.weight": (width,) for x, width in normed.items()}
            if mixer.bias:
                made = "qk" if mixer.keys_as_values else "qkv"
                plain |= {f"{sa}.{x}_proj.bias": matrices[f"{sa}.{x}_proj"][:1] for x in made}
            if mixer.out_bias:
                plain[f"{sa}.o_proj.bias"] = (h,)
            if mixer.sinks:
                plain[f"{sa}.sinks"] = (mixer.heads,)
        else:
            sa, q_out = f"{at}.self_attn", mixer.heads * (mixer.nope_dim + mixer.rope.dim)
            if mixer.q_rank:
                matrices |= {f"{sa}.q_a_proj": (mixer.q_rank, h), f"{sa}.q_b_proj": (q_out, mixer.q_rank)}
                plain[f"{sa}.q_a_layernorm.weight"] = (mixer.q_rank,)
            else:
                matrices[f"{sa}.q_proj"] = (q_out, h)
            matrices[f"{sa}.kv_a_proj_with_mqa"] = (mixer.kv_rank + mixer.rope.dim, h)
            plain[f"{sa}.kv_a_layernorm.weight"] = (mixer.kv_rank,)
            if split_kv:
                matrices[f"{sa}.embed_q"] = (mixer.heads, mixer.kv_rank, mixer.nope_dim)
                matrices[f"{sa}.unembed_out"] = (mixer.heads, mixer.v_dim, mixer.kv_rank)
            else:
                matrices[f"{sa}.kv_b_proj"] = (mixer.heads * (mixer.nope_dim + mixer.v_dim), mixer.kv_rank)
            matrices[f"{sa}.o_proj"] = (h, mixer.heads * mixer.v_dim)
            if mixer.index:
                index, of = mixer.index, f"{sa}.indexer"
                matrices |= {f"{of}.wq_b": (index.heads * index.dim, mixer.q_rank), f"{of}.wk": (index.dim, h)}
                matrices[f"{of}.weights_proj"] = (index.heads, h)
                plain |= {f"{of}.k_norm.{x}": (index.dim,) for x in ("weight", "bias")}

        def mlp_matrices(name: str, m: int) -> dict[str, tuple[int, ...]]:
            return {f"{name}.gate_proj": (m, h), f"{name}.up_proj": (m, h), f"{name}.down_proj": (h, m)}

        if isinstance(rest, DenseMlp):
            matrices |= mlp_matrices(f"{at}.mlp", rest.intermediate)
            continue
        matrices[f"{at}.mlp.gate"] = (rest.count, h)
        if rest.router.bias:
            plain[f"{at}.mlp.gate.bias"] = (rest.count,)
        if rest.bias:
            widths = {"gate_proj": rest.intermediate, "up_proj": rest.intermediate, "down_proj": h}
            plain |= {f"{at}.mlp.switch_mlp.{x}.bias": (rest.count, width) for x, width in widths.items()}
        if rest.router.scoring == "noaux_tc":
            plain[f"{at}.mlp.gate.e_score_correction_bias"] = (rest.count,)
        if rest.router.factors:
            plain[f"{at}.router.per_expert_scale"] = (rest.count,)
        if rest.framed:
            norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm", "pre_feedforward_layernorm_2",
                     "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")  # fmt: skip
            plain |= {f"{at}.{norm}.weight": (h,) for norm in norms}
            plain |= {f"{at}.router.scale": (h,), f"{at}.layer_scalar": (1,)}
        if rest.framed and rest.shared:
            matrices |= mlp_matrices(f"{at}.mlp", rest.shared.intermediate)
        elif rest.shared and rest.shared.gated:
            matrices[f"{at}.mlp.shared_expert_gate"] = (1, h)
            matrices |= mlp_matrices(f"{at}.mlp.shared_expert", rest.shared.intermediate)
        elif rest.shared:
            matrices |= mlp_matrices(f"{at}.mlp.shared_experts", rest.shared.intermediate)
    return matrices, plain


def tensors(v: Variant, split_kv: bool = False) -> dict[str, Raw]:
    """All of them, matrices 4-bit at group 32."""
    matrices, plain = shapes(v, split_kv)
    out = {name: raw(name, "BF16", shape) for name, shape in plain.items()}
    for name, shape in matrices.items():
        out |= quantised(name, shape)
    return out


def expert_stacks(v: Variant) -> dict[str, Raw]:
    out: dict[str, Raw] = {}
    for i in v.moe_layers:
        at, e, m, h = f"model.layers.{i}.mlp.switch_mlp", v.experts.count, v.experts.intermediate, v.hidden_size
        for name, shape in (("gate_proj", (e, m, h)), ("up_proj", (e, m, h)), ("down_proj", (e, h, m))):
            out |= quantised(f"{at}.{name}", shape)
    return out


def fuse(v: Variant, stored: dict[str, Raw]) -> dict[str, Raw]:
    """The four input projections of linear layers as qwen3_next keeps them: two matrices, rows grouped by key head."""
    out = dict(stored)
    for i in v.layers_with(GatedDelta):
        mixer = v.layers[i].mixer
        heads, dk, r = mixer.key_heads, mixer.key_dim, mixer.value_heads // mixer.key_heads
        dv, key = r * mixer.value_dim, heads * dk
        for part in ("weight", "scales", "biases"):
            at = f"model.layers.{i}.linear_attn.in_proj_"
            if f"{at}qkv.{part}" not in out:
                continue
            qkv, z, b, a = (out.pop(f"{at}{x}.{part}") for x in ("qkv", "z", "b", "a"))

            def rows(tensor: Raw) -> np.ndarray:
                return np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)

            q, k, w = np.split(rows(qkv), [key, 2 * key])
            parts = {"qkvz": ((q, dk), (k, dk), (w, dv), (rows(z), dv)), "ba": ((rows(b), r), (rows(a), r))}
            for name, group in parts.items():
                fused = np.concatenate([x.reshape(heads, n, x.shape[1]) for x, n in group], axis=1)
                source = qkv if name == "qkvz" else b
                shape = (fused.shape[0] * fused.shape[1], source.shape[1])
                out[f"{at}{name}.{part}"] = Raw(source.dtype, shape, fused.tobytes())
    return out


# ---- Folders ----------------------------------------------------------------------------------------------------


def safetensors_bytes(stored: dict[str, Raw]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, tensor in stored.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + len(tensor.data)],
        }
        end += len(tensor.data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in stored.values())


@dataclass
class MlxFolder:
    """What goes into a folder of MLX safetensors: one shard and no index, or several with one."""

    tensors: dict[str, Raw]
    shards: int = 2
    config: dict[str, Any] = field(default_factory=lambda: {"quantization": {"bits": 4, "group_size": 32}})

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.shards == 1:
            (folder / "model.safetensors").write_bytes(safetensors_bytes(self.tensors))
            return folder
        names = sorted(self.tensors)
        weight_map = {}
        for shard in range(self.shards):
            part = {name: self.tensors[name] for name in names[shard :: self.shards]}
            file = f"model-{shard + 1:05}-of-{self.shards:05}.safetensors"
            (folder / file).write_bytes(safetensors_bytes(part))
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


def write_packed(folder: Path, v: Variant, stored: dict[str, Raw], layer_bytes: int, bits: dict[str, int]) -> Path:
    """A folder of the older tools. `bits` are those of matrices that are not 4-bit; layer files hold random bytes."""
    experts = folder / "packed_experts"
    experts.mkdir(parents=True)
    manifest: dict[str, Any] = {}
    with (folder / "model_weights.bin").open("wb") as out:
        for name, tensor in stored.items():
            out.write(bytes(-out.tell() % 64))
            manifest[name] = {
                "offset": out.tell(),
                "size": len(tensor.data),
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
            }
            if tensor.dtype == "U32" and name.removesuffix(".weight") in bits:
                manifest[name]["bits"] = bits[name.removesuffix(".weight")]
            out.write(tensor.data)
    content = {"model": "tiny", "num_tensors": len(manifest), "tensors": manifest, "config": {"anything": None}}
    (folder / "model_weights.json").write_text(json.dumps(content))
    for i in v.moe_layers:
        (experts / f"layer_{i:02d}.bin").write_bytes(np.random.default_rng(i).bytes(layer_bytes))
    return folder


# ---- Damage -----------------------------------------------------------------------------------------------------


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
