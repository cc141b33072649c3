"""What config.json says alike in several architectures: names, the size of the model, rope, kinds of layers."""

from __future__ import annotations

from typing import Any

from moeflux.models.config_fields import Fields
from moeflux.models.layers import Rope, Yarn, yarn_mscale

ARCHITECTURES = {
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_moe": "qwen3_moe",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "glm_moe_dsa": "glm_moe_dsa",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "glm4_moe": "glm4_moe",
    "glm4v_moe": "glm4_moe",
    "glm4v_moe_text": "glm4_moe",
    "minimax_m2": "minimax_m2",
    "qwen2_moe": "qwen2_moe",
    "mixtral": "mixtral",
    "olmoe": "olmoe",
    "deepseek_v2": "deepseek_v2",
    "gpt_oss": "gpt_oss",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "qwen4_exp": "qwen4_exp",
    "qwen4_exp_text": "qwen4_exp",
}
"""`model_type` of config.json -> `model_type` of the variant."""

ATTENTION_KINDS = ("full_attention", "linear_attention")


def common(fields: Fields, declared: str, name: str) -> dict[str, Any]:
    fields.only("hidden_act", "silu")
    for field in ("add_cross_attention", "tie_encoder_decoder"):
        fields.only(field, False)
    if ARCHITECTURES[declared] not in ("glm4_moe", "gpt_oss"):
        fields.only("attention_bias", False)
    eos = fields.get("eos_token_id", (int, list), "a token id or a list of them", [])
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(token) is int and token >= 0 for token in eos_ids):
        raise fields.fail("eos_token_id", "a token id or a list of them")
    return {
        "name": name,
        "model_type": ARCHITECTURES[declared],
        "hidden_size": fields.count("hidden_size"),
        "vocab_size": fields.count("vocab_size"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_context": fields.count("max_position_embeddings"),
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
        "eos_ids": eos_ids,
        "bos_id": fields.count("bos_token_id", -1, minimum=0),
    }


def expert_count(fields: Fields, *names: str) -> int:
    """The number that stands under any of these names. If it stands under several, they must agree."""
    present = [name for name in names if fields.values.get(name) is not None] or names[:1]
    count = fields.count(present[0])
    for name in present[1:]:
        if fields.count(name) != count:
            raise fields.fail(name, f"{count}, which is {present[0]}")
    return count


def rope(fields: Fields, dim: int, *, heeds_factor: bool = False, may_truncate: tuple[bool, ...] = (True,)) -> Rope:
    """The rope of architectures that rotate all `dim` channels that can turn, whatever partial_rotary_factor says:
    transformers heeds that field only with YaRN, and then fails. `heeds_factor`: for this architecture it heeds it."""
    parameters, yarn = rope_parameters(fields, may_truncate)
    if heeds_factor:
        parameters.only("partial_rotary_factor", 1.0)
    if yarn:
        factor = parameters.number("partial_rotary_factor", 1.0)
        if factor != 1.0:
            raise parameters.fail("partial_rotary_factor", "1 with YaRN, for implementations differ about others")
    parameters.seen.add("partial_rotary_factor")
    return finished(parameters, dim, yarn)


def partial_rope(fields: Fields, head_dim: int) -> Rope:
    """The rope of architectures that rotate a part of each head."""
    parameters, yarn = rope_parameters(fields)
    factor = parameters.number("partial_rotary_factor")
    if not 0 < factor <= 1:
        raise parameters.fail("partial_rotary_factor", "a number above 0 and up to 1")
    return finished(parameters, int(head_dim * factor), yarn)


def unscaled(fields: Fields, turn: Rope) -> Rope:
    """The rope of architectures about whose YaRN implementations differ."""
    if turn.yarn:
        raise fields.fail("rope_scaling", "none, for implementations differ about it")
    return turn


def finished(parameters: Fields, dim: int, yarn: Yarn | None) -> Rope:
    made = Rope(dim=dim, theta=parameters.number("rope_theta"), yarn=yarn)
    parameters.finish(frozenset())
    return made


def rope_parameters(fields: Fields, may_truncate: tuple[bool, ...] = (True,)) -> tuple[Fields, Yarn | None]:
    """The rope parameters, wherever the config keeps them.

    A config has either one object `rope_parameters`, or `rope_theta` and `partial_rotary_factor` beside an object
    `rope_scaling`, which is absent or null where nothing is scaled. If a config has both, they must agree.
    """
    merged: dict[str, Any] = {}
    for group in ("rope_parameters", "rope_scaling"):
        values = fields.get(group, dict, "an object", {})
        for key, value in values.items():
            key = "rope_type" if key == "type" else key
            if merged.setdefault(key, value) != value:
                raise fields.fail(group, f"{key} {merged[key]!r} as elsewhere in this file")
    for key in ("rope_theta", "partial_rotary_factor"):
        value = fields.number(key, None)
        if value is not None and merged.setdefault(key, value) != value:
            raise fields.fail(key, f"{merged[key]!r} as elsewhere in this file")
    parameters = Fields(merged, f"{fields.where}: rope parameters")
    kind = parameters.get("rope_type", str, "a string", "default")
    if kind not in ("default", "mrope", "yarn"):
        raise parameters.fail("rope_type", "'default' or 'yarn'")
    # These are sections of image positions. Text has the same position in all of them.
    parameters.seen |= {"mrope_section", "mrope_interleaved"}
    return parameters, read_yarn(parameters, may_truncate) if kind == "yarn" else None


def read_yarn(parameters: Fields, may_truncate: tuple[bool, ...]) -> Yarn:
    """transformers ignores a coefficient that is alone or 0. mlx-lm and DeepSeek's own code take 1 and 0 for absent
    ones. Where the two make different magnitudes, nobody knows what the model was trained with: it is refused."""
    parameters.only("attention_factor", None)
    parameters.only("truncate", *may_truncate)
    factor = parameters.number("factor")
    given = {key: parameters.number(key, None) for key in ("mscale", "mscale_all_dim")}
    for key, value in given.items():
        if value is not None and value < 0:
            raise parameters.fail(key, "a number of at least 0")
    mscale, all_dim = given["mscale"], given["mscale_all_dim"]
    own = yarn_mscale(factor, 1.0 if mscale is None else mscale) / yarn_mscale(factor, all_dim or 0.0)
    theirs = yarn_mscale(factor, 1.0)
    if mscale and all_dim:
        theirs = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    if own != theirs:
        alone = next(key for key, value in given.items() if not value)
        raise parameters.fail(
            alone, "both mscale and mscale_all_dim above 0, for implementations differ about one alone"
        )
    return Yarn(
        factor=factor,
        original_context=parameters.count("original_max_position_embeddings"),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        mscale=mscale or 0.0,
        mscale_all_dim=all_dim or 0.0,
        truncate=parameters.flag("truncate", True),
    )


def full_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers have full attention, by `layer_types`, by `full_attention_interval`, or by both if they agree."""
    names = fields.get("layer_types", list, "a list", None)
    interval = fields.count("full_attention_interval", None)
    if names is None and interval is None:
        raise fields.fail("layer_types", f"{layers} layer types, or a full_attention_interval")
    regular = [interval is not None and (i + 1) % interval == 0 for i in range(layers)]
    if names is None:
        return regular
    if len(names) != layers or not all(isinstance(kind, str) and kind in ATTENTION_KINDS for kind in names):
        raise fields.fail("layer_types", f"{layers} entries of {' or '.join(ATTENTION_KINDS)}")
    full = [kind == "full_attention" for kind in names]
    if interval is not None and full != regular:
        raise fields.fail("full_attention_interval", "the interval that layer_types shows")
    return full


def divided_head(fields: Fields, hidden: int, heads: int) -> int:
    """The size of a head where some implementations read no head_dim."""
    fields.only("head_dim", hidden // heads, None)
    return hidden // heads


def layer_count(fields: Fields) -> int:
    layers = fields.count("num_hidden_layers")
    if layers > 4096:
        raise fields.fail("num_hidden_layers", "at most 4096")
    return layers
