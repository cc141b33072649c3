"""Shapes that no golden file has, three of each family: oracle and engine give transformers' logits (`make peers`).

    python tests/golden/check_shapes.py [FAMILY ...]

A shape is drawn from the name of its family and a number, so a failure comes again. Families of which checkpoints.py
makes no other sizes (the hybrids of Qwen, and models that see) are held to their golden files alone.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moeflux
from golden import checkpoints, deepseek
from golden.checkpoint import Checkpoint
from golden.elements import name_seed, splitmix64
from golden.gemma4 import gemma4_text
from golden.gpt_oss import gpt_oss as of_gpt_oss
from golden.qwen4 import qwen4_exp_text
from moeflux import oracle
from moeflux.conversion.convert import convert
from moeflux.stores.storage import ConvertFormat
from support import reference_weights
from support.agreement import disagreement

SHAPES = 3
TOKENS = 40

Draw = Callable[..., Any]
"""One of its arguments."""


def attention(draw: Draw) -> dict[str, Any]:
    """Some heads share a key head, and a head is a part of the hidden state."""
    kv_heads, shared_by, head_dim = draw(1, 2, 3), draw(1, 2, 4), draw(32, 64)
    return {
        "num_attention_heads": kv_heads * shared_by, "num_key_value_heads": kv_heads,
        "hidden_size": kv_heads * shared_by * head_dim, "num_hidden_layers": draw(1, 2, 3),
        "rms_norm_eps": draw(1e-6, 1e-5), "rope_theta": draw(1e4, 5e5), "vocab_size": draw(300, 384, 401),
    }  # fmt: skip


def experts(draw: Draw, count: str, intermediate: str) -> dict[str, Any]:
    return {count: draw(4, 6, 10), "num_experts_per_tok": draw(1, 2, 3), intermediate: draw(32, 96, 160)}


def qwen3_moe(name: str, draw: Draw) -> Checkpoint:
    head_dim = {"head_dim": draw(16, 32, 48), "norm_topk_prob": draw(False, True), "mlp_only_layers": draw([], [1])}
    sizes = attention(draw) | {"num_hidden_layers": draw(2, 3)} | head_dim
    return checkpoints.qwen3_moe(name, **sizes, **experts(draw, "num_experts", "moe_intermediate_size"))


def qwen2_moe(name: str, draw: Draw) -> Checkpoint:
    own = {"shared_expert_intermediate_size": draw(32, 224), "norm_topk_prob": draw(False, True)}
    own |= {"mlp_only_layers": draw([], [1]), "num_hidden_layers": draw(2, 3)}
    sizes = attention(draw) | own
    return checkpoints.qwen2_moe(name, **sizes, **experts(draw, "num_experts", "moe_intermediate_size"))


def mixtral(name: str, draw: Draw) -> Checkpoint:
    own = {"tie_word_embeddings": draw(False, True)}
    return checkpoints.mixtral(
        name, **attention(draw), **own, **experts(draw, "num_local_experts", "intermediate_size")
    )


def olmoe(name: str, draw: Draw) -> Checkpoint:
    own = {"tie_word_embeddings": draw(False, True), "norm_topk_prob": draw(False, True)}
    return checkpoints.olmoe(name, **attention(draw), **own, **experts(draw, "num_experts", "intermediate_size"))


def minimax_m2(name: str, draw: Draw) -> Checkpoint:
    sizes = attention(draw) | {"head_dim": draw(32, 64), "rotary_dim": draw(8, 16, 32)}
    sizes["attn_type_list"] = [1] * sizes["num_hidden_layers"]
    return checkpoints.minimax_m2(name, **sizes, **experts(draw, "num_local_experts", "intermediate_size"))


def glm4_moe(name: str, draw: Draw) -> Checkpoint:
    own = {"head_dim": draw(32, 64), "partial_rotary_factor": draw(0.25, 0.5, 1.0), "use_qk_norm": draw(False, True)}
    own |= {"attention_bias": draw(False, True), "first_k_dense_replace": draw(0, 1), "num_hidden_layers": draw(2, 3)}
    return checkpoints.glm4_moe(
        name, **attention(draw) | own | deepseek_experts(draw) | {"num_nextn_predict_layers": 0}
    )


def deepseek_experts(draw: Draw) -> dict[str, Any]:
    groups = draw(1, 2, 4)
    return {
        "n_routed_experts": groups * draw(4, 6), "n_group": groups, "topk_group": draw(1, max(1, groups - 1), groups),
        "num_experts_per_tok": draw(2, 3), "moe_intermediate_size": draw(32, 96), "n_shared_experts": draw(1, 2),
        "routed_scaling_factor": draw(1.0, 2.5),
    }  # fmt: skip


def latent(draw: Draw) -> dict[str, Any]:
    heads = draw(2, 3, 5)
    return {
        "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": draw(64, 96, 128) * heads,
        "q_lora_rank": draw(None, 32, 96), "kv_lora_rank": draw(32, 96), "qk_nope_head_dim": draw(32, 64),
        "qk_rope_head_dim": draw(16, 32), "v_head_dim": draw(32, 96), "num_hidden_layers": draw(2, 3),
        "num_nextn_predict_layers": 0, "rope_theta": draw(1e4, 5e5),
    } | deepseek_experts(draw)  # fmt: skip


def deepseek_v3(name: str, draw: Draw) -> Checkpoint:
    return deepseek.deepseek_v3(name, **latent(draw))


def deepseek_v2(name: str, draw: Draw) -> Checkpoint:
    return deepseek.deepseek_v2(name, **latent(draw), topk_method=draw("greedy", "group_limited_greedy"))


def deepseek_v32(name: str, draw: Draw) -> Checkpoint:
    index = {"index_n_heads": draw(9, 16), "index_head_dim": draw(32, 48, 64), "index_topk": draw(1, 11, 30)}
    return deepseek.deepseek_v32(name, **latent(draw) | {"q_lora_rank": draw(32, 96)} | index)


def glm_moe_dsa(name: str, draw: Draw) -> Checkpoint:
    index = {"index_n_heads": draw(9, 16), "index_head_dim": draw(32, 48, 64), "index_topk": draw(1, 11, 30)}
    sizes = latent(draw) | {"q_lora_rank": draw(32, 96)} | index
    turn = {"rope_parameters": {"rope_theta": sizes["rope_theta"], "rope_type": "default"}}
    return deepseek.glm_moe_dsa(name, **sizes | turn)


def gpt_oss(name: str, draw: Draw) -> Checkpoint:
    layers, context, per_token = draw(2, 3, 5), draw(16, 32), draw(1, 2, 4)
    scaling = {
        "beta_fast": draw(4.0, 32.0), "beta_slow": 1.0, "factor": draw(2.0, 32.0), "rope_type": "yarn",
        "original_max_position_embeddings": context, "truncate": draw(False, True),
    }  # fmt: skip
    kinds = [draw("sliding_attention", "full_attention") for _ in range(layers)]
    own: dict[str, Any] = {
        "num_hidden_layers": layers, "layer_types": kinds, "sliding_window": draw(1, 7, 30), "rope_scaling": scaling,
        "initial_context_length": context, "swiglu_limit": draw(0.75, 7.0), "swiglu_alpha": draw(1.0, 1.702),
        "num_experts_per_tok": per_token, "experts_per_token": per_token, "num_local_experts": draw(4, 6, 10),
        "intermediate_size": draw(32, 96, 160), "head_dim": draw(16, 48, 64),
    }  # fmt: skip
    sizes = attention(draw) | {"hidden_size": draw(64, 96, 160)}
    return of_gpt_oss(name, mxfp4=draw(False, True), **sizes | own)


def gemma4(name: str, draw: Draw) -> Checkpoint:
    layers, shared_by = draw(2, 3, 5), draw(1, 2, 3)
    kv_heads, global_heads = draw(2, 4), draw(1, 2)
    kinds = [draw("sliding_attention", "full_attention") for _ in range(layers - 1)] + ["full_attention"]
    ropes = {
        "full_attention": {
            "partial_rotary_factor": draw(0.25, 0.5, 1.0), "rope_theta": draw(1e4, 1e6), "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": draw(1e3, 1e4), "rope_type": "default"},
    }  # fmt: skip
    return gemma4_text(
        name, num_hidden_layers=layers, layer_types=kinds, num_attention_heads=kv_heads * shared_by,
        num_key_value_heads=kv_heads, num_global_key_value_heads=global_heads, head_dim=draw(32, 64),
        global_head_dim=draw(32, 64, 128), attention_k_eq_v=draw(False, True), hidden_size=draw(64, 96, 160),
        sliding_window=draw(1, 7, 30), final_logit_softcapping=draw(None, 2.0, 30.0), num_experts=draw(4, 6, 10),
        top_k_experts=draw(1, 2, 4), moe_intermediate_size=draw(32, 96, 160), intermediate_size=draw(32, 96),
        vocab_size=draw(300, 384, 401), rms_norm_eps=draw(1e-6, 1e-5), rope_parameters=ropes,
    )  # fmt: skip


def qwen4_exp(name: str, draw: Draw) -> Checkpoint:
    layers, per_token, value_heads = draw(2, 3, 5), draw(1, 2, 4), draw(2, 6)
    kinds = [draw("linear_attention", "indexed_attention") for _ in range(layers - 1)]
    length, heads, unit = draw(2, 3, 5), draw(1, 3), draw(2, 4, 8)
    return qwen4_exp_text(
        name, num_hidden_layers=layers, layer_types=["linear_attention", *kinds], full_attention_interval=None,
        hidden_size=draw(64, 96, 160), hc_count=draw(2, 3, 5), hc_lowrank=draw(32, 96), ple_layer_ids=[1],
        ngram_size=length, heads_per_ngram=heads, ple_embed_dim=(length - 1) * heads * draw(8, 24) * 4,
        ple_conv_kernel_size=draw(2, 4), ngram_vocab_size_base=draw(20, 300), split_ngram_parts=draw(1, 2, 8),
        linear_num_key_heads=2, linear_num_value_heads=value_heads, output_gate_type=draw("sigmoid", "silu"),
        indexer_compress_ratio=unit, indexer_budget=unit * draw(1, 2, 3), indexer_n_heads=draw(1, 4),
        num_experts=draw(4, 6, 10), num_experts_per_tok=per_token, moe_intermediate_size=draw(32, 96),
        vocab_size=draw(300, 384, 401), rms_norm_eps=draw(1e-6, 1e-5),
    )  # fmt: skip


FAMILIES = (
    qwen3_moe, qwen2_moe, mixtral, olmoe, minimax_m2, glm4_moe, deepseek_v3, deepseek_v32, deepseek_v2, glm_moe_dsa,
    gpt_oss, gemma4, qwen4_exp,
)  # fmt: skip


def made(family: Callable[[str, Draw], Checkpoint], number: int) -> Checkpoint:
    name = f"{family.__name__}, shape {number}"
    random = np.random.default_rng(int(name_seed(name)) % (1 << 63))
    return family(name, lambda *choices: choices[random.integers(len(choices))])


def transformers_logits(folder: Path, ids: list[int]) -> np.ndarray:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {kind: keys for kind, keys in report.items() if keys}
    assert not wrong, f"transformers does not take the checkpoint as it is: {wrong}"
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    return logits


def check(checkpoint: Checkpoint, root: Path) -> str:
    """What is wrong; empty when nothing is."""
    name, vocab = checkpoint.name, checkpoint.config["vocab_size"]
    checkpoints.CHECKPOINTS[name] = lambda: checkpoint
    folder = checkpoints.write(name, root / "hf")
    ids = [int(bits % np.uint64(vocab)) for bits in splitmix64(name_seed(name), TOKENS)]
    expected = transformers_logits(checkpoints.write(name, root / "decoded", decoded=True), ids)
    variant, weights = reference_weights.load(name)
    if wrong := disagreement(oracle.Session(variant, weights).prefill(ids), expected):
        return f"the oracle: {wrong}"
    is_mxfp4 = "quantization_config" in checkpoint.config
    asked = ConvertFormat.asked("mxfp4" if is_mxfp4 else "bf16", dense_bits="bf16")
    convert(folder, root / "packed", format=asked, check="none")
    session = moeflux.load(root / "packed", threads=2, precision="exact").session()
    wrong = disagreement(np.asarray(session.prefill(ids, logits="all")), expected)
    return wrong and f"the engine: {wrong}"


def main(wanted: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    failed = 0
    for family in FAMILIES:
        if wanted and family.__name__ not in wanted:
            continue
        for number in range(SHAPES):
            checkpoint = made(family, number)
            with tempfile.TemporaryDirectory() as root:
                wrong = check(checkpoint, Path(root))
            failed += bool(wrong)
            print(f"{checkpoint.name}: {wrong or 'right'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
