"""A Hugging Face checkpoint seen as the canonical tensors of its variant: naming, splitting, reordering, fp8.

Nothing is read before it is asked for. Reads come in blocks of rows, so memory does not depend on the size of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from moeflux._core import SafetensorsFile
from moeflux.conversion.coded import Coded, Int4Kind, parts_of_coded, take_coded
from moeflux.conversion.float_codes import Fp8Codes, has_nvfp4, take_nvfp4
from moeflux.conversion.made_of import Blocks, Matrix, Packed, Vector
from moeflux.conversion.stored import STORAGE, Stored
from moeflux.errors import ArgumentError, FormatError
from moeflux.models.layers import GatedDelta, LatentAttention
from moeflux.models.ngrams import published_hashes
from moeflux.models.quantised import Fp8, Gptq, Mxfp4, Nvfp4, quantisation_of
from moeflux.models.tensors import DenseShape, dense_shapes
from moeflux.models.variants import QuantFormat, Variant
from moeflux.stores.checkpoints import source_files
from moeflux.stores.floats import FLOAT_BYTES
from moeflux.stores.spans import SpanReader

__all__ = ["Checkpoint"]

VISION = ("visual.", "vision_tower.", "embed_vision.", "mm_projector.", "multi_modal_projector.")

OF_ACTIVATIONS = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")

MIXTRAL_BLOCK = ".block_sparse_moe."
MIXTRAL_WORDS = {
    "e_score_correction_bias": "gate.e_score_correction_bias",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}

OTHER_WORDS = {
    r"\.mlp\.router\.": ".mlp.gate.",
    r"\.router\.proj\.": ".mlp.gate.",
    r"^(model\.layers\.\d+)\.experts\.": r"\1.mlp.experts.",
}
"""gpt_oss's word for a router, and gemma4's for that and for experts."""

T = TypeVar("T")

QWEN_DRAFT = {
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "norm.": "shared_head.norm.",
    "layers.0.": "",
}
"""Qwen's words for the layer that drafts, and DeepSeek's, which stand in stores. Behind `mtp.`."""

QWEN_FOLDED_NORMS = (
    "input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm", "hc_norm", "norm_key",
    "norm_query", "norm_conv", "q_layernorm", "k_layernorm", "enorm", "hnorm", "shared_head.norm",
)  # fmt: skip
"""Published as w - 1 by qwen3_5_moe, qwen3_next and qwen4_exp. linear_attn.norm is not."""


class Checkpoint:
    """The canonical tensors of a Hugging Face folder. Opening it reads headers only, and refuses unknown tensors."""

    def __init__(self, folder: Path, config: dict[str, Any], variant: Variant, keep_fp8: bool = False) -> None:
        self.folder = folder
        self.variant = variant
        self.files = source_files(folder)
        self.reader = SpanReader(self.files)
        self.dropped: list[str] = []
        self.dense: dict[str, Matrix | Packed | Vector] = {}
        self.expert_formats: list[QuantFormat | None] = []  # of gate, up and down that are kept; None where not
        self._quantised = quantisation_of(folder, config)
        self._keep_fp8 = keep_fp8
        self._free: dict[str, Stored] = {}  # tensors that are not placed yet, by canonical spelling
        self._shared: dict[str, Stored | Coded] = {}  # placed tensors of which more canonical tensors are made
        self.tables: set[str] = set()  # names of dense tensors whose rows stay on the disk
        try:
            self._open()
        except BaseException:
            self.reader.close()
            raise

    def _open(self) -> None:
        self._collect()
        self._check_draft()
        for shape in dense_shapes(self.variant):
            self.dense[shape.name] = self._place(shape)
            if shape.is_table:
                self.tables.add(shape.name)
        self.experts = {layer: self._expert_source(layer) for layer in self.variant.moe_layers}
        self._check_experts()
        self._take_hashes()
        self._drop()
        if self._free:
            name = min(self._free)
            stored = self._free[name]
            raise FormatError(
                f'{self.files[stored.file]}: tensor "{stored.name}" {stored.dtype} {list(stored.shape)}: expected '
                f"only tensors of a {self.variant.model_type} model with {self.variant.num_layers} layers"
            )

    def expert(self, layer: int, expert: int) -> tuple[Matrix | Packed | Blocks, ...]:
        """The gate, up and down matrices of one expert."""
        return tuple(self.experts[layer](expert))

    # ---- Names ----------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        for index, path in enumerate(self.files):
            for name, entry in SafetensorsFile(str(path)).tensors.items():
                spelling = self._of_draft(_canonical(name))
                if spelling in self._free:
                    raise FormatError(
                        f'{path}: tensor "{name}": expected once, found also as "{self._free[spelling].name}"'
                    )
                shape = tuple(entry.shape) or (1,)
                self._free[spelling] = Stored(name, index, entry.offset, entry.dtype, shape)

    def _of_draft(self, name: str) -> str:
        """Qwen has words of its own for the layer that drafts. Where it is not kept, they stay."""
        if self.variant.draft is None or not name.startswith(("mtp.", "model.mtp.")):
            return name
        part = name.removeprefix("model.").removeprefix("mtp.")
        for own, usual in QWEN_DRAFT.items():
            if part.startswith(own):
                return f"model.layers.{self.variant.num_layers}.{usual}{part.removeprefix(own)}"
        return name

    def _check_draft(self) -> None:
        if self.variant.draft and f"model.layers.{self.variant.num_layers}.eh_proj.weight" not in self._free:
            raise ArgumentError(
                f"{self.folder}: mtp: expected a checkpoint with a layer for multi-token prediction, mtp.fc or "
                f"model.layers.{self.variant.num_layers}.eh_proj, found none"
            )

    def _drop(self) -> None:
        """Sets aside the parts that are not used."""
        layers = self.variant.num_layers  # what the layer that drafts needs is not free any more
        kinds: list[tuple[str, Callable[[str], bool]]] = [
            ("the vision tower", lambda name: name.removeprefix("model.").startswith(VISION)),
            ("multi-token prediction", lambda name: name.startswith(("mtp.", "model.mtp."))),
            ("multi-token prediction", lambda name: _layer_of(name) >= layers),
            ("precomputed rotary tables", lambda name: name.endswith(".rotary_emb.inv_freq")),
        ]
        if isinstance(self._quantised, Gptq):  # its tools write biases of matrices that have none
            kinds.append(("biases that are zero", lambda name: name.endswith("_proj.bias") and self._is_zero(name)))
        if isinstance(self._quantised, Nvfp4):
            kinds.append(("scales of activations", lambda name: name.endswith(OF_ACTIVATIONS)))
        if self.variant.tied_embeddings:
            kinds.append(("an output matrix equal to the embedding", lambda name: name == "lm_head.weight"))
        sizes: dict[str, list[int]] = {}
        for name in sorted(self._free):
            what = next((kind for kind, belongs in kinds if belongs(name)), None)
            if what:
                stored = self._free.pop(name)
                size = stored.rows * stored.columns * FLOAT_BYTES.get(stored.dtype, 1)
                sizes.setdefault(what, []).append(size)
        self.dropped = [f"{what}: {len(each)} tensors, {sum(each)} bytes" for what, each in sizes.items()]

    def _is_zero(self, name: str) -> bool:
        stored = self._free[name]
        size = stored.rows * stored.columns * FLOAT_BYTES.get(stored.dtype, 1)
        return not self.reader.read(stored.file, stored.offset, size).any()

    def _take_hashes(self) -> None:
        """What n-gram tables were hashed with is published beside them, and must be what config.json says."""
        for name, numbers in published_hashes(self.variant):
            if name not in self._free:
                continue
            stored = self._take_as(name, (len(numbers),), ("I64",))
            found = self.reader.read(stored.file, stored.offset, 8 * len(numbers)).view("<i8").tolist()
            if found != numbers:
                where = f'{self.files[stored.file]}: tensor "{stored.name}"'
                raise FormatError(f"{where}: expected {numbers} from config.json, found {found}")

    def _take(self, name: str, shape: tuple[int, ...]) -> Stored:
        stored = self._take_as(name, shape, tuple(FLOAT_BYTES))
        if stored.dtype != "F8_E4M3":
            return stored
        if not isinstance(self._quantised, Fp8) or len(shape) < 2:
            where = f'{self.files[stored.file]}: tensor "{stored.name}"'
            raise FormatError(f"{where}: expected a matrix and quantization_config.weight_block_size, for it is fp8")
        blocks = tuple(-(-size // block) for size, block in zip(shape[-2:], self._quantised, strict=True))
        scale = self._take(f"{name}_scale_inv", (*shape[:-2], *blocks))
        return Stored(
            stored.name,
            stored.file,
            stored.offset,
            stored.dtype,
            shape,
            scale,
            (self._quantised.rows, self._quantised.columns),
        )

    def _take_as(self, name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> Stored:
        stored = self._free.pop(name, None)
        if stored is None:
            raise FormatError(f'{self.folder}: tensor "{name}" {list(shape)}: expected, found nothing')
        where = f'{self.files[stored.file]}: tensor "{stored.name}"'
        if stored.dtype not in types:
            raise FormatError(f"{where}: expected {', '.join(types)}, found {stored.dtype}")
        if stored.shape != shape:
            raise FormatError(f"{where}: expected shape {list(shape)}, found {list(stored.shape)}")
        return stored

    # ---- Dense tensors --------------------------------------------------------------------------------------

    def _place(self, wanted: DenseShape) -> Matrix | Packed | Vector:
        placed = self._placed(wanted)
        return Packed.instead_of(placed) if isinstance(placed, Matrix) else placed

    def _placed(self, wanted: DenseShape) -> Matrix | Vector:
        if wanted.is_table:
            stored = self._take_as(wanted.name, wanted.shape, tuple(STORAGE))
            return Matrix(wanted.shape, ((stored, 0, stored.rows),))
        if not wanted.is_matrix:
            return self._vector(wanted)
        owner, _, part = wanted.name.rpartition(".")
        if part in ("embed_q", "unembed_out"):
            return self._split_kv_b(owner, part, wanted.shape)
        if part in ("e_proj", "h_proj"):
            return self._half_of_draft(owner, part, wanted.shape)
        if part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b") and self._is_fused(owner):
            return self._unfused(owner, part, wanted.shape)
        matrix = self._take_matrix(wanted.tensor, wanted.shape)
        return Matrix(wanted.shape, ((matrix, 0, matrix.rows),))

    def _vector(self, wanted: DenseShape) -> Vector:
        name, shape = wanted.name, wanted.shape
        if ".mlp.switch_mlp." in name:
            return self._expert_bias(name, shape)
        if name.endswith("conv1d.weight"):
            channels, taps, _ = shape  # published [channels, 1, taps]: the same bytes
            stored = self._take(name, (channels, 1, taps))
            return Vector(shape, stored, stored.dtype)
        stored = self._take(name, shape)
        hybrid = self.variant.model_type in ("qwen3_5_moe", "qwen3_next", "qwen4_exp")
        folded = hybrid and name.removesuffix(".weight").endswith(QWEN_FOLDED_NORMS)
        f32 = folded or name.endswith("A_log")
        return Vector(shape, stored, "F32" if f32 else stored.dtype, add_one=folded)

    def _expert_bias(self, name: str, shape: tuple[int, ...]) -> Vector:
        """Biases of gate and up alternate in one tensor, as the rows of the matrices do."""
        at, _, part = name.removesuffix("_proj.bias").rpartition(".switch_mlp.")
        if part == "down":
            stored = self._take(f"{at}.experts.down_proj_bias", shape)
            return Vector(shape, stored, stored.dtype)
        count, width = shape
        both = self._take_shared(f"{at}.experts.gate_up_proj_bias", (count, 2 * width))
        assert isinstance(both, Stored)
        return Vector(shape, both, both.dtype, every=(("gate", "up").index(part), 2))

    def _split_kv_b(self, owner: str, part: str, shape: tuple[int, ...]) -> Matrix:
        """kv_b_proj holds for each head the rows of keys, then those of values."""
        mixer = self._mixer(owner, LatentAttention)
        head = mixer.nope_dim + mixer.v_dim
        stored = self._take_shared(f"{owner}.kv_b_proj.weight", (mixer.heads * head, mixer.kv_rank))
        starts = range(0, mixer.heads * head, head)
        if part == "embed_q":
            return Matrix(shape, tuple((stored, at, at + mixer.nope_dim) for at in starts), transposed=True)
        return Matrix(shape, tuple((stored, at + mixer.nope_dim, at + head) for at in starts))

    def _half_of_draft(self, owner: str, part: str, shape: tuple[int, ...]) -> Matrix:
        """One matrix takes the embedding of a token and a hidden state, side by side."""
        rows, columns = shape
        stored = self._take_shared(f"{owner}.eh_proj.weight", (rows, 2 * columns))
        first = 0 if part == "e_proj" else columns
        return Matrix(shape, ((stored, 0, rows),), columns=slice(first, first + columns))

    def _mixer(self, owner: str, kind: type[T]) -> T:
        """The mixer of the layer that a tensor's owner belongs to."""
        mixer = self.variant.layer(_layer_of(owner)).mixer
        assert isinstance(mixer, kind)
        return mixer

    def _is_fused(self, owner: str) -> bool:
        names = (f"{owner}.in_proj_qkvz.weight", f"{owner}.in_proj_ba.weight")
        return any(name in self._shared or self._has(name) for name in names)

    def _unfused(self, owner: str, part: str, shape: tuple[int, ...]) -> Matrix:
        """One of the four projections that two matrices hold, with rows grouped by key head: q, k, v, z and b, a."""
        mixer = self._mixer(owner, GatedDelta)
        ratio = mixer.value_heads // mixer.key_heads
        values = ratio * mixer.value_dim
        if part in ("in_proj_qkv", "in_proj_z"):
            name, sizes = "in_proj_qkvz", {"q": mixer.key_dim, "k": mixer.key_dim, "v": values, "z": values}
        else:
            name, sizes = "in_proj_ba", {"b": ratio, "a": ratio}
        begins = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        group = sum(sizes.values())
        rows = group * mixer.key_heads
        stored = self._take_shared(f"{owner}.{name}.weight", (rows, self.variant.hidden_size))
        runs = []
        for wanted in part.removeprefix("in_proj_"):
            starts = range(begins[wanted], rows, group)
            runs += [(stored, start, start + sizes[wanted]) for start in starts]
        return Matrix(shape, tuple(runs))

    def _take_shared(self, name: str, shape: tuple[int, ...]) -> Stored | Coded:
        """A stored tensor that several canonical ones are made of."""
        if name not in self._shared:
            self._shared[name] = self._take_matrix(name, shape)
        return self._shared[name]

    def _take_matrix(self, name: str, shape: tuple[int, ...]) -> Stored | Coded:
        if isinstance(self._quantised, Int4Kind) and name not in self._free and self._has(name):
            return take_coded(name, shape, self._quantised, self._take_as)
        if isinstance(self._quantised, Nvfp4) and has_nvfp4(name, self._quantised, self._free):
            return take_nvfp4(name, shape, self._quantised, self._take_as)
        stored = self._take(name, shape)
        return Fp8Codes.of(stored) if self._keep_fp8 else stored

    def _has(self, name: str) -> bool:
        """Whether a matrix is there, in codes or not."""
        kind = self._quantised
        parts = parts_of_coded(name, kind) if isinstance(kind, Int4Kind) else (f"{name}_packed",)
        return name in self._free or any(part in self._free for part in parts)

    # ---- Experts --------------------------------------------------------------------------------------------

    def _check_experts(self) -> None:
        """All have their codes, if they are published in such, in the same formats."""
        for layer, source in self.experts.items():
            for expert in range(self.variant.experts.count):
                matrices = source(expert)
                found = [None if isinstance(matrix, Matrix) else matrix.format for matrix in matrices]
                self.expert_formats = self.expert_formats or found
                if found != self.expert_formats:
                    i = next(i for i, format in enumerate(found) if format != self.expert_formats[i])
                    raise FormatError(
                        f"{self.files[matrices[i].position[0]]}: expert {expert} of layer {layer}: expected "
                        f"{self.expert_formats[i] or 'no codes'} as experts before, found {found[i] or 'no codes'}"
                    )

    def _expert_source(self, layer: int) -> Callable[[int], list[Matrix | Packed | Blocks]]:
        """Where the experts of a layer come from. They are published stacked, with gate and up in one tensor, or one by
        one."""
        v = self.variant
        prefix = f"model.layers.{layer}.mlp.experts"
        if self.variant.model_type == "gpt_oss":
            return self._alternating(prefix)
        if f"{prefix}.gate_up_proj" in self._free:
            return self._stacked(prefix)
        m, h = v.experts.intermediate, v.hidden_size
        shapes = {"gate_proj": (m, h), "up_proj": (m, h), "down_proj": (h, m)}
        each = [
            [self._whole(f"{prefix}.{expert}.{name}.weight", shape) for name, shape in shapes.items()]
            for expert in range(v.experts.count)
        ]
        return lambda expert: each[expert]

    def _whole(self, name: str, shape: tuple[int, ...]) -> Matrix | Packed | Blocks:
        taken = self._take_matrix(name, shape)
        return Packed.instead_of(Matrix(shape, ((taken, 0, taken.rows),)))

    def _alternating(self, prefix: str) -> Callable[[int], list[Matrix | Packed | Blocks]]:
        """gpt_oss: rows of gate and up alternate. In MXFP4, or plain and with input and output the other way round."""
        v = self.variant
        e, m, h = v.experts.count, v.experts.intermediate, v.hidden_size
        if not isinstance(self._quantised, Mxfp4):
            return self._alternating_columns(prefix)
        stored = {}
        for name, rows, columns in (("gate_up_proj", 2 * m, h), ("down_proj", h, m)):
            if columns % 32:
                raise FormatError(
                    f"{self.folder}: {prefix}.{name}: expected whole blocks of 32, found {columns} columns"
                )
            codes = self._take_as(f"{prefix}.{name}_blocks", (e, rows, columns // 32, 16), ("U8",))
            stored[name] = codes, self._take_as(f"{prefix}.{name}_scales", (e, rows, columns // 32), ("U8",))

        def along(expert: int) -> list[Matrix | Packed | Blocks]:
            both, down = stored["gate_up_proj"], stored["down_proj"]
            gate, up = (Blocks((m, h), *both, 2 * m * expert + part, 2) for part in (0, 1))
            return [gate, up, Blocks((h, m), *down, h * expert, 1)]

        return along

    def _alternating_columns(self, prefix: str) -> Callable[[int], list[Matrix | Packed | Blocks]]:
        v = self.variant
        e, m, h = v.experts.count, v.experts.intermediate, v.hidden_size
        both = self._take(f"{prefix}.gate_up_proj", (e, h, 2 * m))
        down = self._take(f"{prefix}.down_proj", (e, m, h))

        def across(expert: int) -> list[Matrix | Packed | Blocks]:
            rows = (both, expert * h, expert * h + h)
            gate, up = (Matrix((m, h), (rows,), transposed=True, columns=slice(part, None, 2)) for part in (0, 1))
            return [gate, up, Matrix((h, m), ((down, expert * m, expert * m + m),), transposed=True)]

        return across

    def _stacked(self, prefix: str) -> Callable[[int], list[Matrix | Packed | Blocks]]:
        """Stacked experts, each tensor [experts, output, input]. Some models with a vision tower have both tensors the
        other way round."""
        v = self.variant
        e, m, h = v.experts.count, v.experts.intermediate, v.hidden_size
        names = (f"{prefix}.gate_up_proj", f"{prefix}.down_proj")
        shapes, turned = ((e, 2 * m, h), (e, h, m)), ((e, h, 2 * m), (e, m, h))
        if tuple(self._free[name].shape if name in self._free else () for name in names) == turned:
            both, down = map(self._take, names, turned)

            def across(expert: int) -> list[Matrix | Packed | Blocks]:
                rows = (both, expert * h, expert * h + h)
                halves = (slice(0, m), slice(m, 2 * m))
                gate, up = (Matrix((m, h), (rows,), transposed=True, columns=part) for part in halves)
                return [gate, up, Matrix((h, m), ((down, expert * m, expert * m + m),), transposed=True)]

            return across
        pair, last = map(self._take_matrix, names, shapes)

        def along(expert: int) -> list[Matrix | Packed | Blocks]:
            at = expert * 2 * m
            gate, up = (Matrix((m, h), ((pair, start, start + m),)) for start in (at, at + m))
            matrices = (gate, up, Matrix((h, m), ((last, expert * h, expert * h + h),)))
            return [Packed.instead_of(matrix) for matrix in matrices]

        return along


def _canonical(name: str) -> str:
    for prefix, spelling in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            name = spelling + name.removeprefix(prefix)
            break
    if MIXTRAL_BLOCK in name:
        return _in_the_words_of_most(name)
    for own, usual in OTHER_WORDS.items():
        name = re.sub(own, usual, name)
    return name


def _in_the_words_of_most(name: str) -> str:
    """Mixtral and MiniMax have words of their own for routers and experts."""
    at, part = name.split(MIXTRAL_BLOCK, 1)
    for own, usual in MIXTRAL_WORDS.items():
        part = part.replace(own, usual)
    return f"{at}.mlp.{part}"


def _layer_of(name: str) -> int:
    """The layer that a tensor belongs to; -1 outside of the layers."""
    parts = name.split(".")
    inside = len(parts) > 3 and parts[:2] == ["model", "layers"] and parts[2].isdigit() and len(parts[2]) < 6
    return int(parts[2]) if inside else -1
