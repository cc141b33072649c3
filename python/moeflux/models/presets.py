"""Known models by name: their published sizes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from moeflux.errors import ArgumentError
from moeflux.models.layers import (
    ClampedSwiglu,
    DenseMlp,
    GatedDelta,
    GroupedAttention,
    Index,
    LatentAttention,
    Layer,
    NgramEmbedding,
    ResidualStreams,
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


def _deepseek_v3(name: str, model_type: str, *, vocabulary: int, context: int, index: Index | None = None) -> Variant:
    yarn = Yarn(factor=40.0, original_context=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    mixer = LatentAttention(
        heads=128,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        v_dim=128,
        rope=Rope(dim=64, theta=1e4, yarn=yarn),
        index=index,
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
        name=name,
        model_type=model_type,
        layers=(dense,) * 3 + (Layer(mixer, experts),) * 58,
        hidden_size=7168,
        vocab_size=vocabulary,
        rms_norm_eps=1e-6,
        max_context=context,
        eos_ids=(1,),
        bos_id=0,
    )


def _latent(
    name: str, mixer: LatentAttention, *, layers: int, wide: int, experts: RoutedExperts, context: int, **rest: Any
) -> Variant:
    """A dense layer of that width comes before those with experts."""
    return Variant(
        name=name,
        model_type="deepseek_v3",
        layers=(Layer(mixer, DenseMlp(intermediate=wide)),) + (Layer(mixer, experts),) * (layers - 1),
        rms_norm_eps=1e-5,
        max_context=context,
        **rest,
    )


def _kimi() -> Variant:
    yarn = Yarn(factor=64.0, original_context=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    mixer = LatentAttention(
        heads=64, q_rank=1536, kv_rank=512, nope_dim=128, v_dim=128, rope=Rope(dim=64, theta=5e4, yarn=yarn)
    )
    return _latent(
        "Kimi-K2.5", mixer, layers=61, wide=18_432, experts=_plain(384, 2048, scaling=2.827), context=262_144,
        hidden_size=7168, vocab_size=163_840, eos_ids=(163_585,), bos_id=163_584,
    )  # fmt: skip


def _glm_flash() -> Variant:
    rope = Rope(dim=64, theta=1e6)
    mixer = LatentAttention(heads=20, q_rank=768, kv_rank=512, nope_dim=192, v_dim=256, rope=rope)
    return _latent(
        "GLM-4.7-Flash", mixer, layers=47, wide=10_240, experts=_plain(64, 1536, scaling=1.8, per_token=4),
        context=202_752, hidden_size=2048, vocab_size=154_880, eos_ids=(154_820, 154_827, 154_829),
    )  # fmt: skip


def _glm_5() -> Variant:
    index = Index(heads=32, dim=128, count=2048, interleaved=True)
    mixer = LatentAttention(
        heads=64, q_rank=2048, kv_rank=512, nope_dim=192, v_dim=256, rope=Rope(dim=64, theta=1e6), index=index
    )
    dense, sparse = Layer(mixer, DenseMlp(intermediate=12_288)), Layer(mixer, _plain(256, 2048, scaling=2.5))
    return Variant(
        name="GLM-5",
        model_type="glm_moe_dsa",
        layers=(dense,) * 3 + (sparse,) * 75,
        hidden_size=6144,
        vocab_size=154_880,
        rms_norm_eps=1e-5,
        max_context=202_752,
        eos_ids=(154_820, 154_827, 154_829),
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


def _plain(count: int, intermediate: int, *, scaling: float, per_token: int = 8) -> RoutedExperts:
    return RoutedExperts(
        count=count,
        per_token=per_token,
        intermediate=intermediate,
        router=Router(scoring="noaux_tc", groups=1, groups_kept=1, scaling=scaling),
        shared=SharedExpert(intermediate=intermediate),
    )


def _uniform(name: str, model_type: str, *, layers: int, layer: Layer, context: int, **rest: Any) -> Variant:
    """All layers are alike."""
    return Variant(name=name, model_type=model_type, layers=(layer,) * layers, max_context=context, **rest)


def _minimax() -> Variant:
    rope = Rope(dim=64, theta=5e6)
    mixer = GroupedAttention(heads=48, kv_heads=8, head_dim=128, rope=rope, joint_norm=True)
    router = Router(scoring="noaux_tc", groups=1, groups_kept=1)
    experts = RoutedExperts(count=256, per_token=8, intermediate=1536, router=router)
    return _uniform(
        "MiniMax-M2", "minimax_m2", layers=62, layer=Layer(mixer, experts), context=196_608, hidden_size=3072,
        vocab_size=200_064, rms_norm_eps=1e-6, eos_ids=(200_020,),
    )  # fmt: skip


def _qwen15() -> Variant:
    rope = Rope(dim=128, theta=1e6)
    mixer = GroupedAttention(heads=16, kv_heads=16, head_dim=128, rope=rope, qk_norm=False, bias=True)
    experts = RoutedExperts(
        count=60,
        per_token=4,
        intermediate=1408,
        router=Router(scoring="softmax", normalize=False),
        shared=SharedExpert(intermediate=5632, gated=True),
    )
    return _uniform(
        "Qwen1.5-MoE-A2.7B", "qwen2_moe", layers=24, layer=Layer(mixer, experts), context=8192, hidden_size=2048,
        vocab_size=151_936, rms_norm_eps=1e-6, eos_ids=(151_643,), bos_id=151_643,
    )  # fmt: skip


def _mixtral(name: str, *, layers: int, hidden: int, heads: int, wide: int, context: int) -> Variant:
    rope = Rope(dim=128, theta=1e6)
    mixer = GroupedAttention(heads=heads, kv_heads=8, head_dim=128, rope=rope, qk_norm=False)
    experts = RoutedExperts(count=8, per_token=2, intermediate=wide, router=Router(scoring="softmax"))
    return _uniform(
        name, "mixtral", layers=layers, layer=Layer(mixer, experts), context=context, hidden_size=hidden,
        vocab_size=32_000, rms_norm_eps=1e-5, eos_ids=(2,), bos_id=1,
    )  # fmt: skip


def _olmoe() -> Variant:
    mixer = GroupedAttention(heads=16, kv_heads=16, head_dim=128, rope=Rope(dim=128, theta=1e4), joint_norm=True)
    router = Router(scoring="softmax", normalize=False)
    experts = RoutedExperts(count=64, per_token=8, intermediate=1024, router=router)
    return _uniform(
        "OLMoE-1B-7B", "olmoe", layers=16, layer=Layer(mixer, experts), context=4096, hidden_size=2048,
        vocab_size=50_304, rms_norm_eps=1e-5, eos_ids=(50_279,),
    )  # fmt: skip


def _deepseek_v2(
    name: str, *, layers: int, hidden: int, heads: int, q_rank: int, wide: int, mscale: float, experts: RoutedExperts
) -> Variant:
    yarn = Yarn(factor=40.0, original_context=4096, beta_fast=32.0, beta_slow=1.0, mscale=mscale, mscale_all_dim=mscale)
    mixer = LatentAttention(
        heads=heads, q_rank=q_rank, kv_rank=512, nope_dim=128, v_dim=128, rope=Rope(dim=64, theta=1e4, yarn=yarn)
    )
    return Variant(
        name=name,
        model_type="deepseek_v2",
        layers=(Layer(mixer, DenseMlp(intermediate=wide)),) + (Layer(mixer, experts),) * (layers - 1),
        hidden_size=hidden,
        vocab_size=102_400,
        rms_norm_eps=1e-6,
        max_context=163_840,
        eos_ids=(100_001,),
        bos_id=100_000,
    )


def _greedy(count: int, intermediate: int, **router: Any) -> RoutedExperts:
    return RoutedExperts(
        count=count,
        per_token=6,
        intermediate=intermediate,
        router=Router(scoring="softmax", normalize=False, **router),
        shared=SharedExpert(intermediate=2 * intermediate),
    )


def _gpt_oss(name: str, *, layers: int, experts: int) -> Variant:
    """Every second layer, from the first on, sees a window."""
    yarn = Yarn(factor=32.0, original_context=4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
    everything = GroupedAttention(
        heads=64,
        kv_heads=8,
        head_dim=64,
        rope=Rope(dim=64, theta=150_000.0, yarn=yarn),
        qk_norm=False,
        bias=True,
        out_bias=True,
        sinks=True,
    )
    windowed = dataclasses.replace(everything, window=128)
    feed_forward = RoutedExperts(
        count=experts,
        per_token=4,
        intermediate=2880,
        router=Router(scoring="softmax", bias=True),
        bias=True,
        clamped=ClampedSwiglu(alpha=1.702, limit=7.0),
    )
    return Variant(
        name=name,
        model_type="gpt_oss",
        layers=tuple(Layer(everything if i % 2 else windowed, feed_forward) for i in range(layers)),
        hidden_size=2880,
        vocab_size=201_088,
        rms_norm_eps=1e-5,
        max_context=131_072,
        eos_ids=(200_002,),
    )


def _gemma4() -> Variant:
    """Every sixth layer sees everything; the others see a window."""
    windowed = GroupedAttention(
        heads=16,
        kv_heads=8,
        head_dim=256,
        rope=Rope(dim=256, theta=1e4),
        window=1024,
        scale=1.0,
        value_norm=True,
        out_norm=True,
    )
    whole_rope = Rope(dim=512, theta=1e6, turning=64)
    everything = dataclasses.replace(windowed, kv_heads=2, head_dim=512, rope=whole_rope, window=0, keys_as_values=True)
    feed_forward = RoutedExperts(
        count=128,
        per_token=8,
        intermediate=704,
        router=Router(scoring="softmax", factors=True),
        shared=SharedExpert(intermediate=2112),
        geglu=True,
        framed=True,
    )
    return Variant(
        name="gemma-4-26B-A4B",
        model_type="gemma4",
        layers=tuple(Layer(windowed if (i + 1) % 6 else everything, feed_forward) for i in range(30)),
        hidden_size=2816,
        vocab_size=262_144,
        rms_norm_eps=1e-6,
        max_context=262_144,
        tied_embeddings=True,
        embedding_scale=math.sqrt(2816),
        logit_cap=30.0,
        eos_ids=(1, 106),
        bos_id=2,
    )


def _qwen_next() -> Variant:
    """Every fourth layer attends; the second has rows of an n-gram table."""
    experts = _gated(512, 10, 640)
    rope = Rope(dim=64, theta=1e7)
    index = Index(heads=4, dim=128, count=512, unit=4)
    full = GroupedAttention(heads=24, kv_heads=2, head_dim=256, rope=rope, gate=True, index=index)
    delta = GatedDelta(key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4, sigmoid=True)
    ngram = NgramEmbedding(
        index=0,
        width=2560,
        length=3,
        heads=8,
        min_rows=20_000_000,
        divisor=128,
        seed=1234,
        end_id=248_044,
        parts=128,
        taps=4,
    )
    layers = [Layer(full if i % 4 == 3 else delta, experts, ngram if i == 1 else None) for i in range(48)]
    return Variant(
        name="Qwen3.8-Flash-Next",
        model_type="qwen4_exp",
        layers=tuple(layers),
        hidden_size=2560,
        vocab_size=248_320,
        rms_norm_eps=1e-6,
        max_context=262_144,
        streams=ResidualStreams(count=4, rank=320),
        eos_ids=(248_044,),
        bos_id=248_044,
    )


PRESETS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        _qwen("Qwen3.5-397B-A17B", layers=60, hidden=4096, heads=32, value_heads=64, experts=_gated(512, 10, 1024)),
        _qwen("Qwen3.6-35B-A3B", layers=40, hidden=2048, heads=16, value_heads=32, experts=_gated(256, 8, 512)),
        _deepseek_v3("Cogito-V2-671B", "deepseek_v3", vocabulary=128_815, context=MAX_CONTEXT),
        _glm_air(),
        _glm_large(),
        _glm_flash(),
        _kimi(),
        _minimax(),
        _qwen15(),
        _mixtral("Mixtral-8x7B", layers=32, hidden=4096, heads=32, wide=14_336, context=32_768),
        _mixtral("Mixtral-8x22B", layers=56, hidden=6144, heads=48, wide=16_384, context=65_536),
        _olmoe(),
        _deepseek_v2(
            "DeepSeek-V2",
            layers=60,
            hidden=5120,
            heads=128,
            q_rank=1536,
            wide=12_288,
            mscale=1.0,
            experts=_greedy(160, 1536, groups=8, groups_kept=3, scaling=16.0),
        ),
        _deepseek_v2(
            "DeepSeek-V2-Lite",
            layers=27,
            hidden=2048,
            heads=16,
            q_rank=0,
            wide=10_944,
            mscale=0.707,
            experts=_greedy(64, 1408),
        ),
        _gpt_oss("gpt-oss-20b", layers=24, experts=32),
        _gpt_oss("gpt-oss-120b", layers=36, experts=128),
        _gemma4(),
        _qwen_next(),
        _deepseek_v3(
            "DeepSeek-V3.2",
            "deepseek_v32",
            vocabulary=129_280,
            context=163_840,
            index=Index(heads=64, dim=128, count=2048),
        ),
        _glm_5(),
    )
}


def preset(name: str) -> Variant:
    """A preset by its name, in any case, or by an unambiguous part of it ("a3b")."""
    wanted = name.lower()
    if whole := [variant for key, variant in PRESETS.items() if key.lower() == wanted]:
        return whole[0]
    matches = [variant for key, variant in PRESETS.items() if wanted and wanted in key.lower()]
    if len(matches) != 1:
        raise ArgumentError(f'variant "{name}": expected one of {", ".join(PRESETS)}')
    return matches[0]
