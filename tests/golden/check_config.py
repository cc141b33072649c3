"""What transformers and mlx-lm make of config.json where one could read it in several ways (`make peers`).

    python tests/golden/check_config.py

Where both give an answer, and the same one, moeflux gives it too. Where they differ, or one of them fails, moeflux
refuses: nobody knows what the model was trained with. mlx-lm knows no YaRN for qwen3_moe; there transformers decides,
and what is refused for deepseek_v3 is refused too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.models import deepseek_v2 as mlx_deepseek_v2
from mlx_lm.models import deepseek_v3 as mlx_deepseek
from mlx_lm.models import gemma4_text as mlx_gemma4
from mlx_lm.models import glm4_moe as mlx_glm
from mlx_lm.models import glm4_moe_lite as mlx_lite
from mlx_lm.models import minimax as mlx_minimax
from mlx_lm.models import mixtral as mlx_mixtral
from mlx_lm.models import olmoe as mlx_olmoe
from mlx_lm.models import qwen3_moe as mlx_qwen
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf_deepseek
from transformers.models.gemma4 import modeling_gemma4 as hf_gemma4
from transformers.models.glm4_moe import modeling_glm4_moe as hf_glm
from transformers.models.minimax_m2 import modeling_minimax_m2 as hf_minimax
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf_qwen

from golden import checkpoints
from golden.deepseek import deepseek_v3
from moeflux import FormatError, Variant, oracle
from moeflux.models.config import variant_from_config
from moeflux.models.layers import GatedDelta, GroupedAttention, LatentAttention

# model_type: the module of transformers and how its classes begin, the module of mlx-lm.
PEERS = {
    "deepseek_v3": (hf_deepseek, "DeepseekV3", mlx_deepseek),
    "glm4_moe": (hf_glm, "Glm4Moe", mlx_glm),
    "minimax_m2": (hf_minimax, "MiniMaxM2", mlx_minimax),
    "qwen3_moe": (hf_qwen, "Qwen3Moe", mlx_qwen),
}
# Of these only what is taken for a field that is not there.
MLX_ALONE = {
    "deepseek_v2": mlx_deepseek_v2, "glm4_moe_lite": mlx_lite, "mixtral": mlx_mixtral, "olmoe": mlx_olmoe,
    "gemma4_text": mlx_gemma4,
}  # fmt: skip

Answer = np.ndarray
Config = dict[str, Any]

# ---- What YaRN and the rotary factor come to: frequencies times positions, magnitude, softmax scale --------------


def rotated(turn: Callable[[np.ndarray, np.ndarray], np.ndarray], scale: float) -> Answer:
    """How a row of ones at position 37 comes out, and the scale of the scores."""
    return np.concatenate([turn(np.ones(32, np.float32), np.array([37])), [scale]])


def rope_of_transformers(config: Config) -> Answer:
    parsed = transformers.AutoConfig.for_model(**config)
    modeling, name, _ = PEERS[config["model_type"]]
    rotary = getattr(modeling, f"{name}RotaryEmbedding")(parsed)
    attention = getattr(modeling, f"{name}Attention")(parsed, 0)
    apply = modeling.apply_rotary_pos_emb_interleave if modeling is hf_deepseek else modeling.apply_rotary_pos_emb

    def turn(row: np.ndarray, position: np.ndarray) -> np.ndarray:
        x = torch.tensor(row)[None, None, None]
        cos, sin = rotary(x, torch.tensor(position)[None])
        return apply(x, x, cos, sin)[0].numpy().reshape(-1)

    with torch.no_grad():
        return rotated(turn, attention.scaling)


def rope_of_mlx(config: Config) -> Answer:
    model = PEERS[config["model_type"]][2]
    arguments = model.ModelArgs.from_dict(config)
    latent = model is mlx_deepseek
    own = {mlx_deepseek: "DeepseekV3Attention", mlx_minimax: "MiniMaxAttention"}
    kind = getattr(model, own.get(model, "Attention"))
    attention = kind(arguments, 0) if model is mlx_qwen else kind(arguments)

    def turn(row: np.ndarray, position: np.ndarray) -> np.ndarray:
        out = np.array(attention.rope(mx.array(row)[None, None, None], int(position[0])), np.float32).reshape(-1)
        return np.concatenate([out[0::2], out[1::2]]) if latent else out  # as transformers orders the pairs

    return rotated(turn, attention.scale)


def rope_of_moeflux(config: Config) -> Answer:
    variant = variant_from_config(config)
    mixer = next(layer.mixer for layer in variant.layers if not isinstance(layer.mixer, GatedDelta))
    latent = isinstance(mixer, LatentAttention)
    scale = oracle.latent_scale(mixer.head_dim, mixer.rope) if latent else mixer.head_dim**-0.5

    def turn(row: np.ndarray, position: np.ndarray) -> np.ndarray:
        frequencies, magnitude = oracle.rope_frequencies(mixer.rope), oracle.rope_magnitude(mixer.rope)
        out = oracle.rope(row[None, None], position, frequencies, interleaved=latent, magnitude=magnitude).reshape(-1)
        return np.concatenate([out[0::2], out[1::2]]) if latent else out

    return rotated(turn, scale)


PART = "partial_rotary_factor"
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
COEFFICIENTS: list[Config] = [{"factor": 1}, {"factor": 1, "mscale": 0.5}, {"partial_rotary_factor": 0.5}]
COEFFICIENTS += [
    {key: value for key, value in (("mscale", mscale), ("mscale_all_dim", all_dim)) if value is not None}
    for mscale in (None, 0.0, 0.5, 1.0)
    for all_dim in (None, 0.0, 0.5, 1.0)
]


def rope_cases() -> list[tuple[str, Config]]:
    deepseek, qwen = deepseek_v3().config, checkpoints.qwen3_moe(head_dim=32).config
    cases = [(f"deepseek_v3, {each}", {**deepseek, "rope_scaling": YARN | each}) for each in COEFFICIENTS]
    unmistakable = [each for each in COEFFICIENTS if len(each) != 1 and 0.0 not in each.values()]
    cases += [(f"qwen3_moe, {each}", {**qwen, "rope_scaling": YARN | each}) for each in unmistakable]
    half: Config = {"rope_scaling": None, "partial_rotary_factor": 0.5}
    cases += [("deepseek_v3 without YaRN, half", deepseek | half), ("qwen3_moe without YaRN, half", qwen | half)]
    glm = checkpoints.glm4_moe(head_dim=32).config
    cases += [(f"glm4_moe, {part}", glm | {"partial_rotary_factor": part}) for part in (0.25, 0.5, 1.0)]
    minimax = checkpoints.minimax_m2(head_dim=32).config
    cases += [(f"minimax_m2, {channels} channels", minimax | {"rotary_dim": channels}) for channels in (8, 16, 32)]
    cases += [("minimax_m2, YaRN", minimax | {"rope_scaling": YARN})]
    return [*cases, ("glm4_moe, YaRN", glm | {"rope_scaling": YARN}), ("glm4_moe, no part", without(glm, PART))]


# ---- The ropes of gemma4: one for layers that see a window, one for those that see everything ---------------------

GEMMA4_KINDS = ("sliding_attention", "full_attention")


def gemma4_cases() -> list[tuple[str, Config]]:
    config = checkpoints.CHECKPOINTS["gemma4_text"]().config
    both = config["rope_parameters"]
    cases = []
    for part in (0.25, 0.3, 0.5, 1.0):
        changed = {**both, "full_attention": {**both["full_attention"], "partial_rotary_factor": part}}
        cases.append((f"gemma4_text, {part}", {**config, "rope_parameters": changed}))
    return cases


def layer_of(config: Config, kind: str) -> int:
    place: int = config["layer_types"].index(kind)
    return place


def gemma4_of_transformers(config: Config) -> Answer:
    parsed, found = transformers.AutoConfig.for_model(**config), list[Answer]()
    rotary = hf_gemma4.Gemma4TextRotaryEmbedding(parsed)
    for kind in GEMMA4_KINDS:
        attention = hf_gemma4.Gemma4TextAttention(parsed, layer_of(config, kind))
        x = torch.ones(1, 1, 1, attention.head_dim)
        with torch.no_grad():
            cos, sin = rotary(x, torch.tensor([[37]]), kind)
            out = hf_gemma4.apply_rotary_pos_emb(x, cos, sin).numpy()
        found += [out.reshape(-1), np.array([attention.scaling])]
    return np.concatenate(found)


def gemma4_of_mlx(config: Config) -> Answer:
    arguments, found = mlx_gemma4.ModelArgs.from_dict(config), list[Answer]()
    for kind in GEMMA4_KINDS:
        attention = mlx_gemma4.Attention(arguments, layer_of(config, kind))
        out = np.array(attention.rope(mx.ones((1, 1, 1, attention.head_dim)), 37), np.float32)
        found += [out.reshape(-1), np.array([attention.scale])]
    return np.concatenate(found)


def gemma4_of_moeflux(config: Config) -> Answer:
    variant, found = variant_from_config(config), list[Answer]()
    for kind in GEMMA4_KINDS:
        mixer = variant.layers[layer_of(config, kind)].mixer
        assert isinstance(mixer, GroupedAttention)
        x, frequencies = np.ones((1, 1, mixer.head_dim), np.float32), oracle.rope_frequencies(mixer.rope)
        out = oracle.rope(x, np.array([37]), frequencies, interleaved=False)
        found += [out.reshape(-1), np.array([mixer.scale])]
    return np.concatenate(found)


# ---- What is taken for a field that is not there -----------------------------------------------------------------

DEFAULTS = ("n_group", "topk_group", "n_shared_experts", "q_lora_rank", "norm_topk_prob")


def default_cases() -> list[tuple[str, Config]]:
    deepseek, lite, glm = (
        checkpoints.CHECKPOINTS[name]().config for name in ("deepseek_v3", "glm4_moe_lite", "glm4_moe")
    )
    cases = [(field, without(deepseek, field)) for field in (*DEFAULTS, "first_k_dense_replace")]
    cases += [(field, without(lite, field)) for field in DEFAULTS]
    said = ("n_group", "topk_group", "n_shared_experts", "norm_topk_prob", "first_k_dense_replace")
    cases += [(field, without(glm, field)) for field in (*said, "attention_bias", "use_qk_norm")]
    v2, mixtral, olmoe = (checkpoints.CHECKPOINTS[name]().config for name in ("deepseek_v2", "mixtral", "olmoe"))
    cases += [(field, without(v2, field)) for field in ("n_shared_experts", "q_lora_rank", "routed_scaling_factor")]
    cases += [("first_k_dense_replace", without(v2, "first_k_dense_replace"))]
    cases += [("tie_word_embeddings", without(config, "tie_word_embeddings")) for config in (mixtral, olmoe)]
    gemma4 = checkpoints.CHECKPOINTS["gemma4_text"]().config
    own = ("attention_k_eq_v", "tie_word_embeddings", "num_kv_shared_layers", "final_logit_softcapping")
    cases += [(field, without(gemma4, field)) for field in own]
    return [*cases, ("norm_topk_prob", without(olmoe, "norm_topk_prob"))]


def without(config: Config, field: str) -> Config:
    return {key: value for key, value in config.items() if key != field}


def default_of(field: str, declared: str) -> list[Callable[[Config], Answer]]:
    mlx = PEERS[declared][2] if declared in PEERS else MLX_ALONE[declared]
    names = {
        "tie_word_embeddings": "tied_embeddings",
        "routed_scaling_factor": "routed_scaling",
        "n_group": "num_groups",
        "topk_group": "groups_per_token",
        "norm_topk_prob": "normalize_topk",
    }
    return [
        lambda config: np.array([float(getattr(transformers.AutoConfig.for_model(**config), field))]),
        lambda config: np.array([float(getattr(mlx.ModelArgs.from_dict(config), field))]),
        lambda config: np.array([float(of_moeflux(variant_from_config(config), names.get(field, field)))]),
    ]


def of_moeflux(variant: Variant, field: str) -> float:
    if field == "attention_k_eq_v":
        return any(getattr(layer.mixer, "keys_as_values", False) for layer in variant.layers)
    said = variant.identity()
    if "layer_kinds" not in said:  # version 1 has no words for the model
        experts, mixer = variant.experts, variant.layers[0].mixer
        said = {
            "moe_intermediate": experts.intermediate,
            "shared_intermediate": experts.shared.intermediate if experts.shared else 0,
            "normalize_topk": experts.router.normalize,
            "routed_scaling": experts.router.scaling,
            "tied_embeddings": variant.tied_embeddings,
            "q_lora_rank": getattr(mixer, "q_rank", 0),
        }
    if field == "n_shared_experts":
        return said["shared_intermediate"] / said["moe_intermediate"]
    return variant.moe_layers[0] if field == "first_k_dense_replace" else said[field]


# ---- Comparing ---------------------------------------------------------------------------------------------------


def answer(ask: Callable[[Config], Answer], config: Config) -> Answer | None:
    try:
        return ask(dict(config))
    except (FormatError, RuntimeError, TypeError, ValueError, ZeroDivisionError):
        return None


def same(a: Answer | None, b: Answer | None) -> bool:
    return a is not None and b is not None and bool(np.allclose(a, b, rtol=1e-5, atol=1e-5))


def check(what: str, config: Config, asked: list[Callable[[Config], Answer]]) -> None:
    first, *others, ours = (answer(ask, config) for ask in asked)
    agreed = first is not None and all(same(first, other) for other in others)
    expected = "the answer of both" if agreed else "a refusal, for they differ"
    print(f"{what}: {expected}")
    assert same(first, ours) if agreed else ours is None, f"{what}: expected {expected}, found {ours}"


def main() -> None:
    transformers.logging.set_verbosity_error()
    for what, config in rope_cases():
        scaled = config["model_type"] == "qwen3_moe" and config["rope_scaling"]
        check(what, config, [rope_of_transformers, *([] if scaled else [rope_of_mlx]), rope_of_moeflux])
    for what, config in gemma4_cases():
        check(what, config, [gemma4_of_transformers, gemma4_of_mlx, gemma4_of_moeflux])
    for field, config in default_cases():
        declared = config["model_type"]
        check(f"{declared} without {field}", config, default_of(field, declared))


if __name__ == "__main__":
    main()
