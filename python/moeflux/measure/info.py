"""What a model is and what it costs, from a store, a config.json or a preset: the content of `moeflux info`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moeflux import files
from moeflux._core import ExpertFormats
from moeflux.conversion.convert import content_of, matrix_formats
from moeflux.models.gguf import find_gguf
from moeflux.models.hub import downloaded_gguf
from moeflux.models.layers import GatedDelta, GroupedAttention, Index, LatentAttention, RoutedExperts, SharedExpert
from moeflux.models.variants import Variant
from moeflux.sizes import size_text
from moeflux.stores.checkpoints import PLAIN, needs_converting
from moeflux.stores.costs import costs, costs_of_shape, dense_sizes, embedding_bytes, mean_expert_bytes, table_bytes
from moeflux.stores.planned import PlannedStore, planned_store
from moeflux.stores.store import Store, open_store


@dataclass(frozen=True)
class Info:
    """Sizes are bytes. If a model is not converted yet, they are those of a conversion with the default format."""

    target: str
    kind: str  # "packed", "mlx", "gguf", "published", "hf" where it must be converted, "config" or "preset"
    variant: Variant
    formats: dict[str, int]  # "4-bit g64" -> how many dense matrices have it
    expert_format: str
    dense_tensors: int
    dense_bytes: int
    expert_bytes: int  # one expert; the mean, where layers have them in different formats
    experts: int  # in all layers together
    dense_bytes_per_token: int
    expert_bytes_per_token: int
    state_bytes: int  # recurrent and convolution state of one session
    kv_bytes_per_position: int  # f32
    q8_bytes_per_position: int
    window_bytes_per_position: int  # f32: the part of the former that layers with a window forget again
    table_bytes: int = 0  # of n-gram tables, whose rows stay on the disk
    fingerprint: str = ""
    ignored: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # one sentence for each part that a conversion leaves out
    missing: list[str] = field(default_factory=list)

    @property
    def routed_bytes(self) -> int:
        return self.expert_bytes * self.experts

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["variant"] = self.variant.to_dict()
        values["routed_bytes"] = self.routed_bytes
        return values

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def describe(target: str | Path) -> Info:
    """A folder with weights, a GGUF file, a config.json (or a folder with nothing else), a repository as owner/name,
    whose config alone is fetched or whose GGUF file was downloaded, or the name of a preset."""
    path = downloaded_gguf(target) or files.expanded(target)
    if not (_has_weights(path) or needs_converting(path)):
        missing = ["weights: the folder holds a config.json but no model_weights.bin, *.safetensors or *.gguf"]
        return _from_store(str(target), planned_store(target), missing if files.is_folder(path) else [])
    if needs_converting(path):
        return _from_checkpoint(path)
    with open_store(path) as store:
        return _from_store(str(store.path), store, store.missing_extras())


def _has_weights(path: Path) -> bool:
    if not files.is_folder(path):
        return find_gguf(path) is not None
    packed = any(files.exists(path / part / "model_weights.bin") for part in ("", "artifacts"))
    return packed or bool(files.listed(path, "*.safetensors")) or find_gguf(path) is not None


def _from_checkpoint(folder: Path) -> Info:
    content = content_of(folder, None)
    sizes = {name: tensor.bytes for name, tensor in content.placed.items() if not tensor.is_table}
    return Info(
        target=str(folder),
        kind="hf",
        variant=content.variant,
        formats=dict(Counter(matrix_formats(content))),
        expert_format=_of_all(content.experts),
        dense_tensors=len(sizes),
        dense_bytes=sum(sizes.values()),
        expert_bytes=content.layout.bytes,
        table_bytes=sum(tensor.bytes for tensor in content.placed.values() if tensor.is_table),
        dropped=list(content.source["dropped"]),
        missing=["a conversion: `moeflux convert` makes a store of this checkpoint, which can be run"],
        **costs_of_shape(content.variant, content.layout.bytes, sum(sizes.values()), embedding_bytes(sizes)),
    )


def _of_all(*layers: ExpertFormats) -> str:
    return " / ".join(dict.fromkeys(str(each) for layer in layers for each in (layer.gate, layer.up, layer.down)))


def _from_store(target: str, store: Store | PlannedStore, missing: list[str]) -> Info:
    directory, variant = store.directory, store.variant
    sizes = dense_sizes(directory)
    return Info(
        target=target,
        kind=store.kind,
        variant=variant,
        formats=dict(Counter(map(str, directory.formats.values()))),
        expert_format=_of_all(*(directory.experts_of(layer).formats for layer in variant.moe_layers)),
        dense_tensors=len(sizes),
        dense_bytes=sum(sizes.values()),
        expert_bytes=mean_expert_bytes(variant, directory),
        table_bytes=table_bytes(directory),
        fingerprint=store.fingerprint,
        ignored=list(directory.ignored),
        missing=missing,
        **costs(variant, directory),
    )


# ---- As text ----------------------------------------------------------------------------------------------------


def _lines(info: Info) -> list[str]:
    v, e = info.variant, info.variant.experts
    full = v.layers_with(GroupedAttention, LatentAttention)
    mixers = dict.fromkeys(layer.mixer for layer in v.layers)
    streams = f" x {v.streams.count} residual streams" if v.streams else ""
    attends = [mixer for mixer in mixers if not isinstance(mixer, GatedDelta)]
    layers = f"{v.num_layers} ({len(full)} full attention, {len(v.layers_with(GatedDelta))} gated delta-net)"
    dense_layers = v.num_layers - len(v.layers_with(RoutedExperts))
    rows = [
        ("model", f"{v.name} ({v.model_type}), {info.kind}"),
        ("layers", layers + (f", {dense_layers} dense" if dense_layers else "")),
        ("hidden, vocabulary", f"{v.hidden_size}{streams}, {v.vocab_size}" + (", tied" if v.tied_embeddings else "")),
        *[("attention", _attention(mixer)) for mixer in attends],
        ("experts", f"{e.per_token} of {e.count} a layer, width {e.intermediate}, {e.router.scoring} router"),
        ("shared expert", _shared(e.shared)),
        *[("rope", text) for text in dict.fromkeys(map(_rope, attends))],
        ("dense weights", f"{size_text(info.dense_bytes)} in {info.dense_tensors} tensors"),
        ("  formats", ", ".join(f"{name} x {count}" for name, count in info.formats.items())),
        ("routed experts", f"{size_text(info.routed_bytes)}: {info.experts} x {size_text(info.expert_bytes)}"),
        ("  format", info.expert_format),
        *_tables(info),
        *_draft(info),
        (
            "read per token",
            f"{size_text(info.dense_bytes_per_token)} dense + {size_text(info.expert_bytes_per_token)} experts",
        ),
        (
            "session state",
            f"{size_text(info.state_bytes)} + {size_text(info.kv_bytes_per_position)} a position (f32; "
            f"bf16 {size_text(info.kv_bytes_per_position // 2)}, q8 {size_text(info.q8_bytes_per_position)})",
        ),
    ]
    if info.window_bytes_per_position:
        part = info.window_bytes_per_position / info.kv_bytes_per_position
        rows.append(("  windows", f"{part:.0%} of a position is forgotten when no window shows it any more"))
    if info.fingerprint:
        rows.append(("fingerprint", info.fingerprint))
    rows += [("LOSSY", sentence) for sentence in v.lossy]
    rows += [("missing", sentence) for sentence in info.missing]
    if info.ignored:
        rows.append(("not used", f"{len(info.ignored)} tensors, first {info.ignored[0]}"))
    rows += [("not used", sentence) for sentence in info.dropped]
    if info.kind == "hf":
        rows.append(("note", "sizes are those of a conversion as `moeflux convert` does it without flags"))
    if info.kind in ("config", "preset"):
        experts = info.expert_format.split(" / ")[0]
        every = "experts in MXFP4 and every other matrix BF16" if experts == "MXFP4" else f"every matrix {experts}"
        what = "the checkpoint as it is published," if experts in PLAIN else "a conversion"
        rows.append(("note", f"sizes are those of {what} with {every}"))
    return [f"{label:<20}{text}" for label, text in rows]


def _draft(info: Info) -> list[tuple[str, str]]:
    """The layer that drafts, whose dense weights are among the others."""
    draft = info.variant.draft
    if draft is None:
        return []
    count = info.variant.experts.count if isinstance(draft.feed_forward, RoutedExperts) else 0
    return [("layer that drafts", f"{size_text(count * info.expert_bytes)} of experts: {count}, for --speculate mtp")]


def _tables(info: Info) -> list[tuple[str, str]]:
    """The n-gram tables, which stay on the disk."""
    shapes = [layer.ngram for layer in info.variant.layers if layer.ngram]
    if not shapes:
        return []
    rows = sum(shape.rows_per_token for shape in shapes)
    return [("n-gram tables", f"{size_text(info.table_bytes)} on the disk, {rows} rows a token")]


def _attention(mixer: GroupedAttention | LatentAttention) -> str:
    if isinstance(mixer, LatentAttention):
        return f"{mixer.heads} heads x {mixer.head_dim}, {_latent(mixer)}{_index(mixer.index)}"
    window = f", the last {mixer.window} rows" if mixer.window else ""
    return f"{mixer.heads} heads x {mixer.head_dim}, {mixer.kv_heads} kv heads{window}{_index(mixer.index)}"


def _latent(mixer: LatentAttention) -> str:
    return f"latent {mixer.kv_rank} + {mixer.rope.dim}"


def _index(index: Index | None) -> str:
    if index is None:
        return ""
    units = f"{index.count} rows" if index.unit == 1 else f"{index.count} units of {index.unit} rows"
    return f", {units} by an index of {index.heads} heads x {index.dim}"


def _rope(mixer: GroupedAttention | LatentAttention) -> str:
    turn = mixer.rope
    kind = "yarn" if turn.yarn else "vanilla"
    turning = 2 * turn.turning or turn.dim
    return f"{kind}, theta {turn.theta:g}, {turning} of {mixer.head_dim} dimensions"


def _shared(shared: SharedExpert | None) -> str:
    return f"{'gated' if shared.gated else 'plain'}, width {shared.intermediate}" if shared else "none"
