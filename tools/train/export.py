"""A trained model as a Hugging Face folder for `moeflux convert` and transformers; and such a folder read back.

Experts are stored in bf16 and not yet on their grid. `moeflux convert` with the same bits and group puts them there, so
its store has the very numbers that the forward pass of the last steps saw.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train import checkpoint, config
from tools.train.config import Shape
from tools.train.errors import TrainingError
from tools.train.model import Model
from tools.train.tokenizer import FILES

WEIGHTS = "model.safetensors"
ELSEWHERE = ("rope_theta", "partial_rotary_factor", "full_attention_interval")  # in config.json in another form


def hugging_face_config(shape: Shape, vocab_size: int, end_ids: list[int]) -> dict[str, Any]:
    pairs = shape.rotary_dim // 2
    own = {name: value for name, value in asdict(shape).items() if name not in ELSEWHERE}
    rope = {
        "rope_type": "default",
        "rope_theta": shape.rope_theta,
        "partial_rotary_factor": shape.partial_rotary_factor,
        # Of image positions; text has the same position in all three.
        "mrope_section": [pairs // 3 + (pairs % 3 > i) for i in range(3)],
        "mrope_interleaved": True,
    }
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": vocab_size,
        **own,
        "layer_types": shape.layer_types,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": end_ids,
        "dtype": "bfloat16",
    }


def exported(name: str, weight: Tensor) -> Tensor:
    """As stored: bf16; the decay in f32. Norms so that the store's sum of them and one is exact in bf16."""
    weight = weight.detach().float().cpu()
    if name.endswith("A_log"):
        return weight.contiguous()
    if "norm" in name and "linear_attn" not in name:
        weight = (1 + weight).bfloat16().float() - 1
    return weight.bfloat16().contiguous()


def write_folder(state: dict[str, Tensor], shape: Shape, end_ids: list[int], tokenizer: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: exported(name, weight) for name, weight in state.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    vocab_size = len(state["model.embed_tokens.weight"])
    written = hugging_face_config(shape, vocab_size, end_ids)
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    for name in FILES:
        shutil.copyfile(tokenizer / name, folder / name)


def export(run: Path, folder: Path) -> int:
    """Of a run's folder. -> the step it has come to"""
    saved = checkpoint.load(run, "cpu")
    if saved is None:
        raise TrainingError(f"{run}: expected the folder of a run, found no {checkpoint.CHECKPOINT}")
    if folder.exists() and any(folder.iterdir()):
        raise TrainingError(f"{folder}: expected a new or an empty folder, found files in it")
    end_ids = json.loads((run / "data.json").read_text())["end_ids"]
    shape = config.load(run / "config.json").shape
    write_folder(saved["model"], shape, end_ids, run / "tokenizer", folder)
    return saved["step"]


def read_folder(folder: Path) -> Model:
    """An exported model, in f32 on the CPU."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
        weights = load_file(folder / WEIGHTS)
    except FileNotFoundError as error:
        raise TrainingError(
            f"{folder}: expected an exported model, found no {Path(error.filename or WEIGHTS).name}"
        ) from None
    if values.get("model_type") != "qwen3_5_moe_text":
        raise TrainingError(f"{path}: model_type: expected qwen3_5_moe_text, found {values.get('model_type')!r}")
    model = Model(shape_of(values), values["vocab_size"])
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model


def shape_of(values: dict[str, Any]) -> Shape:
    rope = values["rope_parameters"]
    own = {name: values[name] for name in asdict(Shape()) if name not in ELSEWHERE}
    kinds = values["layer_types"]
    interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    return Shape(
        **own,
        full_attention_interval=interval,
        rope_theta=rope["rope_theta"],
        partial_rotary_factor=rope["partial_rotary_factor"],
    )
