"""Tiny checkpoints with a layer that drafts (multi-token prediction), under the names that it is published with.

    .venv-peers/bin/python tests/golden/drafting.py            writes drafts.npz beside this script
    .venv-peers/bin/python tests/golden/drafting.py --check    makes it anew and compares with what is there

Needs the packages of requirements-peers.txt, which have no such layer. So this is what is proven: transformers runs the
model, and the layer as a model of one layer, with its own norm, head, rope and experts. How the layer's input is made
of a token and a hidden state is said once more here, in three lines of torch, as vLLM and SGLang have it.

drafts.npz, float32 [positions - 1, vocab]: NAME, what the layer says after each token of `token_ids(NAME)` but the
first.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import checkpoints
from golden.checkpoint import HIDDEN, LAYERS, Checkpoint
from golden.deepseek import deepseek_v3
from golden.elements import normal

VISION = {"model.visual.patch_embed.proj.bias"}
DRAFTS = Path(__file__).resolve().parent / "drafts.npz"
NAMES = ("qwen3_5_moe", "qwen3_next", "deepseek_v3")
TOLERANCE = 1e-4
"""What one machine and another may differ by, of the range of the logits."""


def checkpoint(name: str) -> Checkpoint:
    """The checkpoint of that name with a whole layer that drafts."""
    return _deepseek() if name == "deepseek_v3" else _qwen(name)


def _qwen(name: str) -> Checkpoint:
    c = checkpoints.CHECKPOINTS[name]()  # it has mtp.fc and mtp.norm
    text = c.config.get("text_config", c.config)
    c.norm("mtp.pre_fc_norm_embedding.weight", HIDDEN, 0.0)
    c.norm("mtp.pre_fc_norm_hidden.weight", HIDDEN, 0.5)
    at, heads, dim = "mtp.layers.0.", text["num_attention_heads"], text["head_dim"]
    c.norm(f"{at}input_layernorm.weight", HIDDEN, 0.0)
    c.norm(f"{at}post_attention_layernorm.weight", HIDDEN, 0.0)
    c.matrix(f"{at}self_attn.q_proj.weight", heads * dim * 2, HIDDEN)
    c.matrix(f"{at}self_attn.k_proj.weight", text["num_key_value_heads"] * dim, HIDDEN)
    c.matrix(f"{at}self_attn.v_proj.weight", text["num_key_value_heads"] * dim, HIDDEN, gain=2.0)
    c.matrix(f"{at}self_attn.o_proj.weight", HIDDEN, heads * dim, gain=2.0)
    c.norm(f"{at}self_attn.q_norm.weight", dim, 0.5)
    c.norm(f"{at}self_attn.k_norm.weight", dim, 0.5)
    experts, width = text["num_experts"], text["moe_intermediate_size"]
    c.matrix(f"{at}mlp.gate.weight", experts, HIDDEN, gain=2.0)
    c.matrix(f"{at}mlp.shared_expert_gate.weight", 1, HIDDEN)
    c.swiglu(f"{at}mlp.shared_expert.", HIDDEN, text["shared_expert_intermediate_size"])
    if name == "qwen3_next":
        for expert in range(experts):
            c.swiglu(f"{at}mlp.experts.{expert}.", HIDDEN, width)
    else:
        c.matrix(f"{at}mlp.experts.gate_up_proj", experts, 2 * width, HIDDEN, gain=1.5)
        c.matrix(f"{at}mlp.experts.down_proj", experts, HIDDEN, width)
    return c


def _deepseek() -> Checkpoint:
    c = deepseek_v3(mtp_layer=LAYERS)  # it has eh_proj
    at = f"model.layers.{LAYERS}."
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        c.norm(f"{at}{norm}.weight", HIDDEN, 1.0)
    c.tensors[f"{at}embed_tokens.weight"] = c.tensors["model.embed_tokens.weight"]
    c.tensors[f"{at}shared_head.head.weight"] = c.tensors["lm_head.weight"]
    before = f"model.layers.{LAYERS - 1}."
    for name in [name for name in c.tensors if name.startswith(before)]:
        dtype, array = c.tensors[name]
        own = name.replace(before, at)
        if "norm" in name:
            c.norm(own, len(array), 1.0)
        elif name.endswith("correction_bias"):
            c.add(own, normal(f"{c.name}/{own}", array.shape, 0.2), dtype)
        else:
            gain = float(np.sqrt(array.shape[-1]) * (array.astype(np.uint32) << 16).view(np.float32).std())
            c.matrix(own, *array.shape, gain=gain)
    return c


def write(name: str, folder: str | Path) -> Path:
    return checkpoints.write_checkpoint(checkpoint(name), folder)


def alone(c: Checkpoint) -> Checkpoint:
    """The layer as a model of one layer, with the embedding and the head of the whole."""
    config = {**c.config.get("text_config", c.config), "num_hidden_layers": 1}
    moved = {f"model.layers.{LAYERS}.shared_head.norm.": "model.norm.", f"model.layers.{LAYERS}.": "model.layers.0."}
    if "layer_types" in config or c.name == "qwen3_next":
        config["layer_types"] = ["full_attention"]
    if c.name != "deepseek_v3":
        moved = {"mtp.norm.": "model.norm.", "mtp.layers.0.": "model.layers.0."}
    else:
        config["first_k_dense_replace"] = 0
    one = Checkpoint(c.name, config)
    embed = next(name for name in c.tensors if name.endswith("embed_tokens.weight"))
    one.tensors = {"model.embed_tokens.weight": c.tensors[embed], "lm_head.weight": c.tensors["lm_head.weight"]}
    ends = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "embed_tokens.weight", "shared_head.head.weight")
    for name, tensor in c.tensors.items():
        start = next((each for each in moved if name.startswith(each)), None)
        if start and not name.endswith(ends):
            one.tensors[moved[start] + name.removeprefix(start)] = tensor
    return one


def ends_of(c: Checkpoint) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The norms of a token and of a hidden state, as factors, and the matrix behind them, in float32."""
    names, folded = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc"), 1
    if c.name == "deepseek_v3":
        names, folded = tuple(f"model.layers.{LAYERS}.{name}" for name in ("enorm", "hnorm", "eh_proj")), 0  # type: ignore[assignment]
    token, hidden, both = ((c.tensors[f"{name}.weight"][1].astype(np.uint32) << 16).view(np.float32) for name in names)
    return token + folded, hidden + folded, both


def logits_of(name: str, root: Path) -> np.ndarray:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    c = checkpoint(name)

    def loaded(part: Checkpoint, folder: Path) -> torch.nn.Module:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoints.write_checkpoint(part, folder),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        unused = {key for key in report["unexpected_keys"] if not key.startswith(("mtp.", f"model.layers.{LAYERS}."))}
        assert not report["missing_keys"] and not report["mismatched_keys"] and not unused - VISION, report
        return model

    whole, one = loaded(c, root / name), loaded(alone(c), root / f"{name}-alone")
    ids = torch.tensor([checkpoints.token_ids(name)])
    token_norm, hidden_norm, matrix = (torch.tensor(each) for each in ends_of(c))

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    with torch.no_grad():
        hidden = whole.model(ids, use_cache=False).last_hidden_state  # behind the last norm
        tokens = one.model.embed_tokens(ids)
        both = torch.cat([normed(tokens[:, 1:], token_norm), normed(hidden[:, :-1], hidden_norm)], dim=-1)
        said = one(inputs_embeds=both @ matrix.T, use_cache=False).logits[0]
    return np.asarray(said.float().numpy())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = {name: logits_of(name, Path(folder)) for name in NAMES}
    if "--check" not in sys.argv:
        np.savez_compressed(DRAFTS, **made)
        return
    with np.load(DRAFTS) as kept:
        assert set(kept.files) == set(made)
        for name in NAMES:
            error = np.abs(made[name].astype(np.float64) - kept[name]).max() / np.ptp(kept[name])
            assert error <= TOLERANCE, f"{name}: {error:.1e} of the range"
            print(f"{name}: as it was, to {error:.1e} of the range")


if __name__ == "__main__":
    main()
