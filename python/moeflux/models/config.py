"""config.json -> Variant. Every field is either used, known not to matter here, or refused by name; nothing is guessed.

Some fields select a behaviour of which moeflux has one form only (an activation, a bias). They must have that value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeflux import files
from moeflux.errors import FormatError
from moeflux.models.config_deepseek import read_deepseek, read_deepseek_v2, read_glm
from moeflux.models.config_fields import REQUIRED, Fields, missing_blocks
from moeflux.models.config_gemma4 import read_gemma4
from moeflux.models.config_gpt_oss import read_gpt_oss
from moeflux.models.config_parts import ARCHITECTURES
from moeflux.models.config_plain import read_minimax, read_mixtral, read_olmoe
from moeflux.models.config_qwen import read_qwen, read_qwen2
from moeflux.models.config_qwen4 import read_qwen4
from moeflux.models.variants import MAX_CONTEXT, Variant

READERS = {
    "deepseek_v2": read_deepseek_v2,
    "deepseek_v3": read_deepseek,
    "deepseek_v32": read_deepseek,
    "gemma4": read_gemma4,
    "glm4_moe": read_glm,
    "glm_moe_dsa": read_deepseek,
    "gpt_oss": read_gpt_oss,
    "minimax_m2": read_minimax,
    "mixtral": read_mixtral,
    "olmoe": read_olmoe,
    "qwen2_moe": read_qwen2,
    "qwen4_exp": read_qwen4,
}
"""`model_type` of the variant -> what reads its config.json; of all others, read_qwen."""

TEXT_PARTS = {
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe"),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "glm4v_moe": ("glm4v_moe_text",),
    "kimi_k25": ("kimi_k2", "deepseek_v3"),
    "kimi_vl": ("deepseek_v3",),
    "gemma4": ("gemma4_text",),
    "qwen4_exp": ("qwen4_exp_text", "qwen4_exp"),
}
"""`model_type` of a model that sees -> those of its text_config, which is all that is read of it."""

SEEING = frozenset(TEXT_PARTS) - {"qwen3_5_moe"}
"""Those that are never a text part themselves."""

# These fields say how a model was trained, saved or sampled, not what it computes.
IRRELEVANT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout
    attn_implementation auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size ep_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id
    language_model_only length_penalty mamba_ssm_dtype max_length max_window_layers min_length mtp_num_hidden_layers
    mtp_use_dedicated_embeddings no_repeat_ngram_size num_beam_groups num_beams num_mtp_layers
    num_nextn_predict_layers num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads qk_head_dim quantization
    quantization_config remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise sep_token_id seq_aux suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p unsloth_fixed
    unsloth_version use_bfloat16 use_cache
    """.split()
)

# Tokens that stand for images. Some say them in the text part, too.
IMAGE_TOKENS = frozenset(
    """
    image_end_token_id image_start_token_id image_token_id media_placeholder_token_id video_end_token_id
    video_start_token_id video_token_id vision_end_token_id vision_start_token_id
    """.split()
)

# A model with a vision tower has these fields, but its text part does not need them.
IRRELEVANT_BESIDE_TEXT = (
    IRRELEVANT
    | IMAGE_TOKENS
    | frozenset(
        """
        audio_config audio_token_id boa_token_id boi_token_id bos_token_id eoa_token_id eoa_token_index eoi_token_id
        eos_token_id ignore_index projection_hidden_size projection_layer_norm_eps tie_word_embeddings
        use_unified_vision_chunk video_placeholder vision_config vision_soft_tokens_per_image
        """.split()
    )
)


def variant_from_config(config: str | Path | dict[str, Any]) -> Variant:
    """The variant of a parsed config, of a config.json, or of the folder that holds one."""
    if isinstance(config, dict):
        return read_config(config, "config.json", str(config.get("_name_or_path") or ""))
    path = files.expanded(config)
    if files.is_folder(path):
        path = path / "config.json"
    return read_config(files.read_json(path), str(path), files.resolved(path).parent.name)


def variant_from_manifest(manifest: Any, where: str, name: str) -> Variant:
    """The variant behind a model_weights.json whose `config` block an older tool filled in.

    Those tools knew two architectures, which differ in their fields, and one context length.
    """
    block = Fields(manifest, where).get("config", dict, "an object", REQUIRED)
    architecture = "deepseek_v3" if "kv_lora_rank" in block else "qwen3_5_moe"
    config = {key: value for key, value in block.items() if key not in ("default_bits", "default_group_size")}
    config |= {"model_type": architecture, "max_position_embeddings": MAX_CONTEXT}
    return read_config(config, f"{where}: config", name)


def read_config(config: Any, where: str, name: str) -> Variant:
    root = Fields(config, where)
    declared = root.get("model_type", str, "a string", REQUIRED)
    if declared not in ARCHITECTURES:
        error = root.fail("model_type", " or ".join(ARCHITECTURES))
        text = config.get("text_config")
        raise FormatError(f"{error}{missing_blocks({*config, *(text if isinstance(text, dict) else ())})}")
    fields = root
    if "text_config" in config or declared in SEEING:
        fields = text_part(root, declared)
    read = READERS.get(ARCHITECTURES[declared], read_qwen)
    variant = read(fields, declared, name or declared)
    fields.finish(IRRELEVANT)
    return variant


def text_part(root: Fields, declared: str) -> Fields:
    """The text_config of a model with a vision tower, together with what the whole config says about its text part."""
    if declared not in TEXT_PARTS:
        raise root.fail("text_config", f"none in a {declared} model")
    fields = Fields(root.get("text_config", dict, "an object", REQUIRED), f"{root.where}: text_config")
    fields.only("model_type", *TEXT_PARTS[declared])
    whole = root.values
    if declared == "kimi_k25":
        root.said("tie_word_embeddings")
    if declared == "kimi_vl" and "tie_word_embeddings" not in whole:
        fields.said("tie_word_embeddings")
    fields.seen |= IMAGE_TOKENS
    if "tie_word_embeddings" in whole:
        fields.only("tie_word_embeddings", whole["tie_word_embeddings"])
        fields.values = {**fields.values, "tie_word_embeddings": whole["tie_word_embeddings"]}
    if declared == "gemma4" and "vocab_size" in whole:  # mlx-lm asks for it here
        root.only("vocab_size", fields.values.get("vocab_size"))
    # Only the whole gemma4 says that the end of a turn ends an answer, too.
    if fields.values.get("eos_token_id") is None or (declared == "gemma4" and whole.get("eos_token_id") is not None):
        fields.values = {**fields.values, "eos_token_id": whole.get("eos_token_id")}
    root.finish(IRRELEVANT_BESIDE_TEXT)
    return fields
