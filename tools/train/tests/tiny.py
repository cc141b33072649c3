"""The model and the training of these tests."""

from __future__ import annotations

from tools.train.config import Config, Course, Shape

SHAPE = Shape(
    hidden_size=64,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    max_position_embeddings=256,
)
COURSE = Course(
    steps=30,
    batch=4,
    context=64,
    learning_rate=4e-3,
    warmup=5,
    quantised=0.3,
    log_every=5,
    save_every=10,
    evaluate_every=15,
    evaluate_windows=4,
)
TINY = Config(SHAPE, COURSE)
GRID = (COURSE.bits, COURSE.group)
