"""What a model is made of: `Variant`, the shape and flavours of one model, and the presets of the known ones.

A variant is a frozen value. It is read from a checkpoint's config.json (`variant_from_config`), from a store's
moeflux.json (`Variant.from_dict`) or taken from `PRESETS`. Everything that needs a dimension takes it from here.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from moeflux._core import QuantFormat
from moeflux.errors import FormatError, found

__all__ = ["MAX_CONTEXT", "PRESETS", "QuantFormat", "Variant", "preset"]

MAX_CONTEXT = 1 << 20
"""Positions a session may hold at most, and the largest length a snapshot may claim."""

MODEL_TYPES = ("qwen3_5_moe", "qwen3_next", "qwen3_moe", "deepseek_v3")
ATTENTION = ("gqa", "mla")
ROPE = ("vanilla", "yarn")
ROUTER = ("softmax", "noaux_tc")
SHARED_EXPERT = ("none", "gated", "plain")
LAYER_KINDS = ("linear", "full")
MLP_KINDS = ("dense", "moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Shape constants and flavour selectors of one model. A dimension that the flavour does not use is 0."""

    name: str
    model_type: str  # one of MODEL_TYPES

    # Flavours.
    attention: str  # "gqa": grouped queries with q/k norm; "mla": latent attention
    rope: str  # "vanilla" or "yarn"
    router: str  # "softmax", or "noaux_tc": sigmoid scores, bias for choosing, groups
    shared_expert: str  # "none", "gated": sigmoid(gate . x) * shared(x), "plain": added as it is
    attention_gate: bool = False  # gqa: q_proj yields [query | gate] a head; output *= sigmoid(gate)
    tied_embeddings: bool = False  # the embedding is the output matrix too; there is no lm_head

    # Layers, first to last. `layer_kinds[i]` is the attention, `mlp_kinds[i]` the feed-forward part of layer i.
    layer_kinds: tuple[str, ...]
    mlp_kinds: tuple[str, ...]

    hidden_size: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    max_context: int = MAX_CONTEXT

    # Full attention. For "mla" the head size is qk_nope_dim + qk_rope_dim and rotary_dim is qk_rope_dim.
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

    # Gated delta-net (layers of kind "linear").
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    conv_kernel: int = 0

    # Latent attention. q_lora_rank 0: queries come from one q_proj.
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_dim: int = 0
    qk_rope_dim: int = 0
    v_head_dim: int = 0

    # Feed-forward.
    num_experts: int
    experts_per_token: int
    moe_intermediate: int
    shared_intermediate: int = 0
    dense_intermediate: int = 0
    normalize_topk: bool = True
    num_groups: int = 0
    groups_per_token: int = 0
    routed_scaling: float = 1.0

    # YaRN. A mscale of 0 is an absent one.
    yarn_factor: float = 0.0
    yarn_original_context: int = 0
    yarn_beta_fast: float = 0.0
    yarn_beta_slow: float = 0.0
    yarn_mscale: float = 0.0
    yarn_mscale_all_dim: float = 0.0

    # Tokens with a meaning to the engine's users; -1 is an absent one.
    eos_ids: tuple[int, ...] = ()
    bos_id: int = -1
    think_start_id: int = -1
    think_end_id: int = -1

    # Sentences naming each departure from the model as published; empty for a faithful one.
    lossy: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    # ---- Layers -------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "full")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "linear")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.mlp_kinds) if kind == "moe")

    @property
    def full_attention_interval(self) -> int:
        """n when exactly the layers n-1, 2n-1, ... are full; 0 when the pattern is another."""
        interval = self.full_layers[0] + 1 if self.full_layers else 0
        regular = interval and self.layer_kinds == interval_kinds(self.num_layers, interval)
        return interval if regular else 0

    @property
    def first_dense_layers(self) -> int:
        """How many layers at the start have a dense MLP."""
        return next((i for i, kind in enumerate(self.mlp_kinds) if kind == "moe"), self.num_layers)

    # ---- Derived widths -----------------------------------------------------------------------------------------

    @property
    def linear_total_key(self) -> int:
        return self.linear_key_heads * self.linear_key_dim

    @property
    def linear_total_value(self) -> int:
        return self.linear_value_heads * self.linear_value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.linear_total_key + self.linear_total_value

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def q_proj_out(self) -> int:
        return self.num_heads * self.head_dim * (2 if self.attention_gate else 1)

    @property
    def o_proj_in(self) -> int:
        return self.num_heads * (self.v_head_dim if self.attention == "mla" else self.head_dim)

    @property
    def kv_a_out(self) -> int:
        return self.kv_lora_rank + self.qk_rope_dim

    @property
    def kv_b_out(self) -> int:
        return self.num_heads * (self.qk_nope_dim + self.v_head_dim)

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by. DeepSeek's YaRN scales it by m(factor, mscale_all_dim) squared."""
        scale = 1.0 / math.sqrt(self.head_dim)
        if self.attention == "mla" and self.rope == "yarn" and self.yarn_mscale_all_dim:
            scale *= yarn_mscale(self.yarn_factor, self.yarn_mscale_all_dim) ** 2
        return scale

    # ---- State --------------------------------------------------------------------------------------------------

    @property
    def conv_state_bytes(self) -> int:
        """f32 rows a linear layer keeps of its convolution's input."""
        return max(self.conv_kernel - 1, 0) * self.conv_channels * 4

    @property
    def recurrent_state_bytes(self) -> int:
        """f32 state [value head][value][key] of a linear layer."""
        return self.linear_value_heads * self.linear_value_dim * self.linear_key_dim * 4

    def kv_row_bytes(self, dtype_bytes: int = 4) -> int:
        """Bytes that one position of one full layer adds to the cache."""
        width = self.kv_a_out if self.attention == "mla" else 2 * self.kv_dim
        return width * dtype_bytes

    # ---- Making variants ----------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, fields: dict[str, Any], where: str = "variant") -> Variant:
        """Inverse of `to_dict`: every field must be there, none besides, each of its own type."""
        if not isinstance(fields, dict):
            raise FormatError(f"{where}: expected an object, found {type(fields).__name__}")
        known = {field.name: field for field in dataclasses.fields(cls)}
        for unknown in fields.keys() - known.keys():
            raise FormatError(f'{where}: unknown field "{unknown}"')
        for missing in known.keys() - fields.keys():
            raise FormatError(f'{where}: field "{missing}" is missing')
        return cls(**{key: _typed(f"{where}.{key}", str(known[key].type), value) for key, value in fields.items()})

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def with_layers(self, layers: int) -> Variant:
        """The same model cut to its first layers, or lengthened by repeating its pattern."""
        if layers < 1:
            raise FormatError(f"layers: expected at least 1, found {layers}")
        period = self.full_attention_interval or self.num_layers
        kinds = tuple(self.layer_kinds[i if i < self.num_layers else i % period] for i in range(layers))
        mlps = tuple(self.mlp_kinds[min(i, self.num_layers - 1)] for i in range(layers))
        return dataclasses.replace(self, layer_kinds=kinds, mlp_kinds=mlps)

    def with_experts_per_token(self, experts: int) -> Variant:
        """Fewer or more experts than the model was trained with. Lossy, and says so wherever the variant shows."""
        if experts == self.experts_per_token:
            return self
        if not 1 <= experts <= self.num_experts:
            raise FormatError(
                f"experts_per_token: expected at most num_experts, {self.num_experts}, and at least 1, "
                f"found {found(experts)}"
            )
        note = f"uses {experts} experts per token, the model's own number is {self.experts_per_token}"
        return dataclasses.replace(self, experts_per_token=experts, lossy=(*self.lossy, note))


def yarn_mscale(factor: float, coefficient: float) -> float:
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def interval_kinds(layers: int, interval: int) -> tuple[str, ...]:
    """Layer kinds where every interval-th layer is full attention."""
    return tuple("full" if (i + 1) % interval == 0 else "linear" for i in range(layers))


# ---- Checks -----------------------------------------------------------------------------------------------------


def _typed(where: str, annotation: str, value: Any) -> Any:
    """`value` as the annotated type, exactly: no number becomes a bool, no string a number."""
    if annotation.startswith("tuple"):
        element = annotation[len("tuple[") :].split(",")[0]
        if not isinstance(value, list | tuple):
            raise FormatError(f"{where}: expected a list, found {type(value).__name__}")
        return tuple(_typed(f"{where}[{i}]", element, item) for i, item in enumerate(value))
    if annotation == "float" and type(value) in (int, float):
        return float(value)
    if type(value).__name__ != annotation:
        raise FormatError(f"{where}: expected {annotation}, found {type(value).__name__}")
    return value


def _check(v: Variant) -> None:
    """Every rule a variant must obey, each failure naming the field."""

    def require(holds: bool, field: str, expected: str) -> None:
        if not holds:
            raise FormatError(f"{v.name}: {field}: expected {expected}, found {getattr(v, field)!r}")

    def one_of(field: str, values: tuple[str, ...]) -> None:
        require(getattr(v, field) in values, field, " or ".join(values))

    def positive(*fields: str) -> None:
        for field in fields:
            require(getattr(v, field) > 0, field, "a positive number")

    one_of("model_type", MODEL_TYPES)
    one_of("attention", ATTENTION)
    one_of("rope", ROPE)
    one_of("router", ROUTER)
    one_of("shared_expert", SHARED_EXPERT)
    require(0 < v.num_layers <= 4096, "layer_kinds", "1 to 4096 layers")
    require(all(kind in LAYER_KINDS for kind in v.layer_kinds), "layer_kinds", f"only {', '.join(LAYER_KINDS)}")
    require(all(kind in MLP_KINDS for kind in v.mlp_kinds), "mlp_kinds", f"only {', '.join(MLP_KINDS)}")
    require(len(v.mlp_kinds) == v.num_layers, "mlp_kinds", f"{v.num_layers} entries, one a layer")
    require("moe" in v.mlp_kinds, "mlp_kinds", "at least one layer with experts")
    positive("hidden_size", "vocab_size", "max_context", "rms_norm_eps", "rope_theta", "num_heads", "num_kv_heads")
    positive("head_dim", "rotary_dim", "num_experts", "experts_per_token", "moe_intermediate", "routed_scaling")
    require(v.max_context <= MAX_CONTEXT, "max_context", f"at most {MAX_CONTEXT}")
    require(v.rotary_dim % 2 == 0, "rotary_dim", "an even number")
    require(v.rotary_dim <= v.head_dim, "rotary_dim", f"at most head_dim ({v.head_dim})")
    require(v.experts_per_token <= v.num_experts, "experts_per_token", f"at most num_experts ({v.num_experts})")
    for dim in ("hidden_size", "moe_intermediate"):
        require(getattr(v, dim) % 32 == 0, dim, "a multiple of 32")

    if v.attention == "gqa":
        require(v.num_heads % v.num_kv_heads == 0, "num_heads", f"a multiple of num_kv_heads ({v.num_kv_heads})")
    else:
        positive("kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_head_dim")
        require(v.q_lora_rank >= 0, "q_lora_rank", "0 or a positive number")
        require(v.head_dim == v.qk_nope_dim + v.qk_rope_dim, "head_dim", "qk_nope_dim + qk_rope_dim")
        require(v.rotary_dim == v.qk_rope_dim, "rotary_dim", f"qk_rope_dim ({v.qk_rope_dim})")
        require(not v.attention_gate, "attention_gate", "false with latent attention")
        require("linear" not in v.layer_kinds, "layer_kinds", "only full layers with latent attention")
    if "linear" in v.layer_kinds:
        positive("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim")
        require(2 <= v.conv_kernel <= 16, "conv_kernel", "2 to 16")
        require(
            v.linear_value_heads % v.linear_key_heads == 0,
            "linear_value_heads",
            f"a multiple of linear_key_heads ({v.linear_key_heads})",
        )
    if v.shared_expert != "none":
        positive("shared_intermediate")
    if "dense" in v.mlp_kinds:
        positive("dense_intermediate")
    if v.router == "noaux_tc":
        positive("num_groups", "groups_per_token")
        require(v.num_experts % v.num_groups == 0, "num_groups", f"a divisor of num_experts ({v.num_experts})")
        require(v.groups_per_token <= v.num_groups, "groups_per_token", f"at most num_groups ({v.num_groups})")
        reach = v.groups_per_token * (v.num_experts // v.num_groups)
        require(v.experts_per_token <= reach, "experts_per_token", f"at most the {reach} experts of the kept groups")
    if v.rope == "yarn":
        positive("yarn_factor", "yarn_original_context", "yarn_beta_fast", "yarn_beta_slow")
        for coefficient in ("yarn_mscale", "yarn_mscale_all_dim"):
            require(getattr(v, coefficient) >= 0, coefficient, "0 or a positive number")


# ---- Presets ----------------------------------------------------------------------------------------------------


def _qwen(name: str, **shape: Any) -> Variant:
    layers = shape.pop("layers")
    return Variant(
        name=name,
        model_type="qwen3_5_moe",
        attention="gqa",
        rope="vanilla",
        router="softmax",
        shared_expert="gated",
        attention_gate=True,
        layer_kinds=interval_kinds(layers, 4),
        mlp_kinds=("moe",) * layers,
        vocab_size=248_320,
        num_kv_heads=2,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        linear_key_heads=16,
        linear_key_dim=128,
        linear_value_dim=128,
        conv_kernel=4,
        eos_ids=(248_046, 248_044),
        think_start_id=248_068,
        think_end_id=248_069,
        **shape,
    )


PRESETS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        _qwen(
            "Qwen3.5-397B-A17B",
            layers=60,
            hidden_size=4096,
            num_heads=32,
            linear_value_heads=64,
            num_experts=512,
            experts_per_token=10,
            moe_intermediate=1024,
            shared_intermediate=1024,
        ),
        _qwen(
            "Qwen3.6-35B-A3B",
            layers=40,
            hidden_size=2048,
            num_heads=16,
            linear_value_heads=32,
            num_experts=256,
            experts_per_token=8,
            moe_intermediate=512,
            shared_intermediate=512,
        ),
        Variant(
            name="Cogito-V2-671B",
            model_type="deepseek_v3",
            attention="mla",
            rope="yarn",
            router="noaux_tc",
            shared_expert="plain",
            layer_kinds=("full",) * 61,
            mlp_kinds=("dense",) * 3 + ("moe",) * 58,
            hidden_size=7168,
            vocab_size=128_815,
            num_heads=128,
            num_kv_heads=128,
            head_dim=192,
            rotary_dim=64,
            rope_theta=1e4,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_dim=128,
            qk_rope_dim=64,
            v_head_dim=128,
            num_experts=256,
            experts_per_token=8,
            moe_intermediate=2048,
            shared_intermediate=2048,
            dense_intermediate=18_432,
            num_groups=8,
            groups_per_token=4,
            routed_scaling=2.5,
            yarn_factor=40.0,
            yarn_original_context=4096,
            yarn_beta_fast=32.0,
            yarn_beta_slow=1.0,
            yarn_mscale=1.0,
            yarn_mscale_all_dim=1.0,
            eos_ids=(1,),
            bos_id=0,
        ),
    )
}


def preset(name: str) -> Variant:
    """A preset by its name, in any case, or by an unambiguous part of it ("a3b")."""
    matches = [variant for key, variant in PRESETS.items() if name and name.lower() in key.lower()]
    if len(matches) != 1:
        raise FormatError(f'variant "{name}": expected one of {", ".join(PRESETS)}')
    return matches[0]
