"""Two models of published families, made small."""

from __future__ import annotations

from moeflux.models.presets import preset
from support.flat import changed

SMALL = {"hidden_size": 128, "vocab_size": 512, "moe_intermediate": 64, "shared_intermediate": 64, "num_experts": 32}
QWEN = changed(
    preset("a3b").with_layers(4), **SMALL, num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=16, linear_key_heads=2,
    linear_value_heads=4, linear_key_dim=32, linear_value_dim=32, experts_per_token=4,
)  # fmt: skip
DEEPSEEK = changed(
    preset("cogito").with_layers(5), **SMALL, num_heads=4, num_kv_heads=4, head_dim=96, rotary_dim=32, qk_nope_dim=64,
    qk_rope_dim=32, v_head_dim=64, q_lora_rank=64, kv_lora_rank=64, dense_intermediate=128, experts_per_token=4,
)  # fmt: skip
