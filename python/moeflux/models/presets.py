"""Known models by name: their published sizes."""

from __future__ import annotations

from moeflux.errors import ArgumentError
from moeflux.models.layers import (
    DenseMlp,
    GatedDelta,
    GroupedAttention,
    LatentAttention,
    Layer,
    Rope,
    RoutedExperts,
    Router,
    SharedExpert,
    Yarn,
)
from moeflux.models.variants import MAX_CONTEXT, Variant

__all__ = ["PRESETS", "preset"]


def _qwen(name: str, *, layers: int, hidden: int, heads: int, value_heads: int, experts: RoutedExperts) -> Variant:
    """Every fourth layer attends in full."""
    rope = Rope(dim=64, theta=1e7)
    full = Layer(GroupedAttention(heads=heads, kv_heads=2, head_dim=256, rope=rope, gate=True), experts)
    delta = GatedDelta(key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, taps=4)
    return Variant(
        name=name,
        model_type="qwen3_5_moe",
        layers=tuple(full if i % 4 == 3 else Layer(delta, experts) for i in range(layers)),
        hidden_size=hidden,
        vocab_size=248_320,
        rms_norm_eps=1e-6,
        max_context=MAX_CONTEXT,
        eos_ids=(248_046, 248_044),
        think_start_id=248_068,
        think_end_id=248_069,
    )


def _gated(count: int, per_token: int, intermediate: int) -> RoutedExperts:
    return RoutedExperts(
        count=count,
        per_token=per_token,
        intermediate=intermediate,
        router=Router(scoring="softmax"),
        shared=SharedExpert(intermediate=intermediate, gated=True),
    )


def _cogito() -> Variant:
    yarn = Yarn(factor=40.0, original_context=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    mixer = LatentAttention(
        heads=128, q_rank=1536, kv_rank=512, nope_dim=128, v_dim=128, rope=Rope(dim=64, theta=1e4, yarn=yarn)
    )
    experts = RoutedExperts(
        count=256,
        per_token=8,
        intermediate=2048,
        router=Router(scoring="noaux_tc", groups=8, groups_kept=4, scaling=2.5),
        shared=SharedExpert(intermediate=2048),
    )
    dense = Layer(mixer, DenseMlp(intermediate=18_432))
    return Variant(
        name="Cogito-V2-671B",
        model_type="deepseek_v3",
        layers=(dense,) * 3 + (Layer(mixer, experts),) * 58,
        hidden_size=7168,
        vocab_size=128_815,
        rms_norm_eps=1e-6,
        max_context=MAX_CONTEXT,
        eos_ids=(1,),
        bos_id=0,
    )


def _glm(
    name: str, *, layers: int, dense: int, hidden: int, wide: int, qk_norm: bool, context: int, experts: RoutedExperts
) -> Variant:
    """Half of each head turns. `dense` layers of that width come before those with experts."""
    rope = Rope(dim=64, theta=1e6)
    mixer = GroupedAttention(heads=96, kv_heads=8, head_dim=128, rope=rope, qk_norm=qk_norm, bias=True)
    return Variant(
        name=name,
        model_type="glm4_moe",
        layers=(Layer(mixer, DenseMlp(intermediate=wide)),) * dense + (Layer(mixer, experts),) * (layers - dense),
        hidden_size=hidden,
        vocab_size=151_552,
        rms_norm_eps=1e-5,
        max_context=context,
        eos_ids=(151_329, 151_336, 151_338),
    )


def _glm_air() -> Variant:
    experts = _plain(128, 1408, scaling=1.0)
    return _glm(
        "GLM-4.5-Air", layers=46, dense=1, hidden=4096, wide=10_944, qk_norm=False, context=131_072, experts=experts
    )


def _glm_large() -> Variant:
    experts = _plain(160, 1536, scaling=2.5)
    return _glm("GLM-4.7", layers=92, dense=3, hidden=5120, wide=12_288, qk_norm=True, context=202_752, experts=experts)


def _plain(count: int, intermediate: int, *, scaling: float) -> RoutedExperts:
    return RoutedExperts(
        count=count,
        per_token=8,
        intermediate=intermediate,
        router=Router(scoring="noaux_tc", groups=1, groups_kept=1, scaling=scaling),
        shared=SharedExpert(intermediate=intermediate),
    )


PRESETS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        _qwen("Qwen3.5-397B-A17B", layers=60, hidden=4096, heads=32, value_heads=64, experts=_gated(512, 10, 1024)),
        _qwen("Qwen3.6-35B-A3B", layers=40, hidden=2048, heads=16, value_heads=32, experts=_gated(256, 8, 512)),
        _cogito(),
        _glm_air(),
        _glm_large(),
    )
}


def preset(name: str) -> Variant:
    """A preset by its name, in any case, or by an unambiguous part of it ("a3b")."""
    matches = [variant for key, variant in PRESETS.items() if name and name.lower() in key.lower()]
    if len(matches) != 1:
        raise ArgumentError(f'variant "{name}": expected one of {", ".join(PRESETS)}')
    return matches[0]
