"""The definition of the mathematics: every op, layer and whole step, in NumPy and float64.

The oracle is written to be read, not to be fast. Everything that computes logits elsewhere (CPU and Metal kernels, the
engine) is held to it within a stated tolerance. The oracle itself is held to transformers and mlx-lm. It imports NumPy
and `moeflux.models` and nothing else of moeflux, so that it stays an independent opinion: it even unpacks quantised
weights itself.

stored.py   tensors as they lie in a store, and their numbers
ops.py      the ops, each a function of arrays
model.py    layers, state, `Session`
sampling.py which token comes next
"""

from moeflux.oracle.model import KeyValueState, LatentState, LinearState, Session, Widened, empty_state, layer
from moeflux.oracle.ops import (
    attention,
    bias_add,
    combine,
    conv1d,
    delta_net_gates,
    delta_net_query_key,
    embed,
    expert_ffn,
    gated_delta,
    gated_rms_norm,
    latent_scale,
    matmul,
    matvec,
    mla_attention,
    residual_add,
    rms_norm,
    rms_norm_heads,
    rope,
    rope_frequencies,
    rope_magnitude,
    route_grouped,
    route_softmax,
    sigmoid_gate,
    swiglu,
    vanilla_frequencies,
    yarn_frequencies,
)
from moeflux.oracle.stored import (
    Stored,
    Weights,
    bf16_to_float,
    dequantize,
    float_to_bf16,
    pack_codes,
    quantize,
    quantize_rows,
    rows_of_codes,
    unpack_codes,
    widen,
)

__all__ = [
    "KeyValueState",
    "LatentState",
    "LinearState",
    "Session",
    "Stored",
    "Weights",
    "Widened",
    "attention",
    "bf16_to_float",
    "bias_add",
    "combine",
    "conv1d",
    "delta_net_gates",
    "delta_net_query_key",
    "dequantize",
    "embed",
    "empty_state",
    "expert_ffn",
    "float_to_bf16",
    "gated_delta",
    "gated_rms_norm",
    "latent_scale",
    "layer",
    "matmul",
    "matvec",
    "mla_attention",
    "pack_codes",
    "quantize",
    "quantize_rows",
    "residual_add",
    "rms_norm",
    "rms_norm_heads",
    "rope",
    "rope_frequencies",
    "rope_magnitude",
    "route_grouped",
    "route_softmax",
    "rows_of_codes",
    "sigmoid_gate",
    "swiglu",
    "unpack_codes",
    "vanilla_frequencies",
    "widen",
    "yarn_frequencies",
]
