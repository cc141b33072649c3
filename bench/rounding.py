"""What calibration gains: a model, converted to fewer bits with and without it, beside itself in bf16. A third
conversion searches for scales as calibration does, but counts all columns alike: the gain that needs no text.

    python bench/rounding.py FOLDER [--store STORE] [--bits 3 2 q4_k] [--group-size 64]

FOLDER gets the built-in model (or a store of its architecture, such as a synthetic one with --vocab 8192) as a
checkpoint in bf16, stories that the built-in model tells as texts, and the conversions. Then `moeflux eval` compares
them: with the stories that calibration has not seen, and with a page of the documentation, which is another kind of
text. What is there already stays.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import moeflux  # noqa: E402
from golden.checkpoint import safetensors_bytes  # noqa: E402
from golden.elements import to_bf16  # noqa: E402
from moeflux import ConvertFormat, builtin, cli  # noqa: E402
from moeflux.conversion.checkpoint import QWEN_FOLDED_NORMS  # noqa: E402
from moeflux.conversion.importance import Calibration, Importance  # noqa: E402
from moeflux.measure.calibrate import calibration_of  # noqa: E402
from moeflux.models.tensors import dense_shapes  # noqa: E402
from moeflux.oracle.stored import widen  # noqa: E402
from moeflux.stores.store import Store, open_store  # noqa: E402

STORIES = {"calibration.txt": range(40), "stories.txt": range(100, 120)}
BEGINNINGS = ("Once upon a time", "One day, a girl", "There was an old man", "In a small village", "The little dog")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
Tensors = dict[str, tuple[str, np.ndarray]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--store", type=Path, default=builtin.path())
    parser.add_argument("--bits", nargs="+", default=["3", "2"])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=6000, help="of each text, at most")
    asked = parser.parse_args()
    source = asked.folder / "bf16"
    if not source.exists():
        write_checkpoint(asked.store, source)
    tell_stories(asked.folder)
    stores = [str(source)]
    for bits in asked.bits:
        for name in ("plain", "searched", "calibrated"):
            stores.append(str(asked.folder / f"{bits}-g{asked.group_size}-{name}"))
            if not Path(stores[-1]).exists():
                moeflux.convert(
                    source,
                    stores[-1],
                    format=ConvertFormat.asked(int(bits) if bits.isdigit() else bits, asked.group_size),
                    calibration=calibration(name, source, asked.folder),
                )
    for text in (asked.folder / "stories.txt", ROOT / "docs" / "serving.md"):
        print(f"\n{text.name}", flush=True)
        cli.main(["eval", *stores, "--text", str(text), "--window", "256", "--tokens", str(asked.tokens)])
    return 0


def calibration(name: str, source: Path, folder: Path) -> Calibration | None:
    """ "searched": scales of least error where all columns count alike, as calibration would search for them."""
    if name == "plain":
        return None
    if name == "calibrated":
        return calibration_of(folder / "calibration.txt", source)
    variant = moeflux.variant_from_config(source)
    dense = {each.name: (1, np.ones(each.shape[-1])) for each in dense_shapes(variant) if each.is_matrix}
    shape = (variant.experts.count, variant.experts.intermediate)
    one = [1, np.ones(variant.hidden_size), np.ones(shape[0], np.int64), np.ones(shape)]
    return Calibration("alike", lambda: Importance(dense, dict.fromkeys(variant.moe_layers, one)))


def tell_stories(folder: Path) -> None:
    with moeflux.load() as model:
        for name, seeds in STORIES.items():
            if not (folder / name).exists():
                told = []
                for seed in seeds:
                    begun = BEGINNINGS[seed % len(BEGINNINGS)]
                    told.append(begun + str(model.session().complete(begun, max_tokens=300, temperature=1, seed=seed)))
                (folder / name).write_text("\n\n".join(told))


def write_checkpoint(path: Path, folder: Path) -> None:
    """A store of qwen3_5_moe with the numbers that it stands for, rounded to bf16, as it would be published."""
    with open_store(path) as store:
        tensors = dense(store)
        for layer in store.variant.moe_layers:
            each = [[widen(part) for part in store.expert(layer, e)] for e in range(store.variant.experts.count)]
            at = f"model.layers.{layer}.mlp.experts."
            tensors[f"{at}gate_up_proj"] = ("BF16", np.stack([np.concatenate(parts[:2]) for parts in each]))
            tensors[f"{at}down_proj"] = ("BF16", np.stack([parts[2] for parts in each]))
    folder.mkdir(parents=True)
    stored = {
        name: (dtype, to_bf16(values.astype(np.float32)) if dtype == "BF16" else values.astype(np.float32))
        for name, (dtype, values) in tensors.items()
    }
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored))
    config = json.loads((path / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER:
        (folder / name).write_bytes((builtin.path() / name).read_bytes())


def dense(store: Store) -> Tensors:
    found: Tensors = {}
    for name in store.directory.formats:
        found[f"{name}.weight"] = ("BF16", widen(store.tensor(name)))
    for name, tensor in store.directory.tensors.items():
        if not tensor.is_vector:
            continue
        values = widen(store.tensor(name))
        if name.removesuffix(".weight").endswith(QWEN_FOLDED_NORMS):
            found[name] = ("BF16", values - 1)
        elif name.endswith("conv1d.weight"):
            found[name] = ("BF16", values.swapaxes(1, 2))
        else:
            found[name] = ("F32" if name.endswith("A_log") else "BF16", values)
    return found


if __name__ == "__main__":
    sys.exit(main())
