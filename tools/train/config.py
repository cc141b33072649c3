"""What to train and how: the shape of the model, the course of the training, presets of both."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tools.train.errors import TrainingError


@dataclass(frozen=True)
class Shape:
    """A qwen3_5_moe model. Fields have the names of its config.json; the vocabulary is the tokenizer's."""

    hidden_size: int = 384
    num_hidden_layers: int = 8
    full_attention_interval: int = 4  # every fourth layer attends, the others are gated delta-net
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 3
    linear_num_value_heads: int = 6
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    shared_expert_intermediate_size: int = 256
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6

    @property
    def layer_types(self) -> list[str]:
        kinds = ("linear_attention", "full_attention")
        return [kinds[(i + 1) % self.full_attention_interval == 0] for i in range(self.num_hidden_layers)]

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class Course:
    """How a model is trained. Shares of the steps: the learning rate falls over the last `decay` of them, the experts
    are quantised in the forward pass in the last `quantised`."""

    steps: int = 4000
    batch: int = 64  # windows a step
    context: int = 1024  # tokens a window
    learning_rate: float = 2e-3
    warmup: int = 100  # steps
    decay: float = 0.4
    weight_decay: float = 0.1
    clip: float = 1.0  # of the gradient's norm
    balance: float = 0.01  # weight of the loss that keeps experts equally used
    router_z: float = 1e-4  # weight of the loss that keeps router logits small
    chat: float = 0.0  # share of windows that are chats while the rate is constant; 0: as the corpus has them
    chat_end: float = 0.5  # what it rises to while the rate falls, where there are chats
    quantised: float = 0.15
    bits: int = 4  # of the experts' grid, as in `moeflux convert --bits`
    group: int = 64  # as in `moeflux convert --group-size`
    log_every: int = 50
    save_every: int = 500
    evaluate_every: int = 1000
    evaluate_windows: int = 128  # of each kind of text
    seed: int = 1


@dataclass(frozen=True)
class Config:
    shape: Shape = field(default_factory=Shape)
    course: Course = field(default_factory=Course)


TOY = Config(
    Shape(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=1024,
    ),
    Course(
        steps=300,
        batch=8,
        context=256,
        warmup=20,
        log_every=10,
        save_every=100,
        evaluate_every=100,
        evaluate_windows=16,
    ),
)
PRESETS = {"toy": TOY, "48m": Config()}
"""48m is the shape of the model that comes with moeflux."""


def changed(config: Config, settings: dict[str, str]) -> Config:
    """The config with fields set by name, as `--set name=value` gives them."""
    parts = {"shape": config.shape, "course": config.course}
    for name, text in settings.items():
        owner = next((key for key, part in parts.items() if any(name == each.name for each in fields(part))), None)
        if owner is None:
            known = ", ".join(each.name for part in parts.values() for each in fields(part))
            raise TrainingError(f"--set {name}: expected one of {known}")
        parts[owner] = replace(parts[owner], **{name: _parsed(name, text, type(getattr(parts[owner], name)))})
    return Config(**parts)


def _parsed(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise TrainingError(f"--set {name}: expected {kind.__name__}, found {text!r}") from None


def check(config: Config) -> None:
    """Refuses what could not be trained, or not be converted afterwards."""
    shape, course = config.shape, config.course

    def require(condition: bool, sentence: str) -> None:
        if not condition:
            raise TrainingError(sentence)

    for part in (shape, course):
        for each in fields(part):
            value = getattr(part, each.name)
            require(value > 0 or each.name in ALLOWED_ZERO, f"{each.name}: expected more than 0, found {value}")
            require(value >= 0, f"{each.name}: expected at least 0, found {value}")
    for name in ("decay", "quantised", "chat", "chat_end"):
        require(getattr(course, name) <= 1, f"{name}: expected a share of at most 1, found {getattr(course, name)}")
    require(course.bits in (2, 3, 4, 5, 6, 8), f"bits: expected 2, 3, 4, 5, 6 or 8, found {course.bits}")
    require(course.group in (32, 64, 128), f"group: expected 32, 64 or 128, found {course.group}")
    for name in ("hidden_size", "moe_intermediate_size"):
        require(
            getattr(shape, name) % course.group == 0,
            f"{name}: expected a multiple of the group of {course.group}, found {getattr(shape, name)}",
        )
    require(
        course.context <= shape.max_position_embeddings,
        f"context: expected at most max_position_embeddings, {shape.max_position_embeddings}, found {course.context}",
    )
    require(
        shape.num_experts_per_tok <= shape.num_experts,
        f"num_experts_per_tok: expected at most num_experts, {shape.num_experts}, found {shape.num_experts_per_tok}",
    )
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        require(
            getattr(shape, many) % getattr(shape, few) == 0,
            f"{many}: expected a multiple of {few}, {getattr(shape, few)}, found {getattr(shape, many)}",
        )
    require(
        shape.rotary_dim % 2 == 0 and 0 < shape.rotary_dim <= shape.head_dim,
        f"partial_rotary_factor: expected an even part of head_dim {shape.head_dim}, found {shape.rotary_dim} of it",
    )


ALLOWED_ZERO = {
    *("tie_word_embeddings", "warmup", "decay", "weight_decay", "balance", "router_z", "chat", "chat_end"),
    *("quantised", "seed"),
}


def save(config: Config, path: Path) -> None:
    path.write_text(json.dumps(asdict(config), indent=1) + "\n")


def load(path: Path) -> Config:
    values = json.loads(path.read_text())
    return Config(Shape(**values["shape"]), Course(**values["course"]))
