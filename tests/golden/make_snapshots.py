"""Makes the saved sessions of tests/golden/snapshots: each once. They are read for ever; a format that changes gets
files of its own beside these, and this makes those that are not there yet.

    python tests/golden/make_snapshots.py

Each is a session after TOKENS on a tiny checkpoint, stored plain. logits.npz holds what follows it: the engine's logits
of NEXT, token by token, which for f32 rows were held to the oracle here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moeflux
from golden.checkpoint import Checkpoint, safetensors_bytes
from golden.checkpoints import qwen3_next, qwen_hybrid
from golden.deepseek import deepseek_v3
from golden.gpt_oss import gpt_oss
from moeflux.conversion.convert import convert
from moeflux.stores.storage import ConvertFormat
from support.engine import oracle_at, steps
from support.mlx_folder import write_mlx_folder

FOLDER = Path(__file__).resolve().parent / "snapshots"
TOKENS = [17, 300, 5, 42, 5]
NEXT = [1, 99, 350]


def windows() -> Checkpoint:
    """Every second layer sees the last three rows."""
    kinds = ["sliding_attention", "full_attention"]
    return gpt_oss(mxfp4=False, num_hidden_layers=2, layer_types=kinds, sliding_window=3)


def hybrid() -> Checkpoint:
    """Recurrent states of 8 KiB, for files that stay small."""
    config = qwen3_next().config | {"linear_num_value_heads": 2, "linear_value_head_dim": 32}
    return qwen_hybrid("qwen3_next", config, prefix="model.", fused=True, a_log="BF16", tied=False)


CHECKPOINTS = {"hybrid": hybrid, "latent": deepseek_v3, "windows": windows}


class Saved(NamedTuple):
    checkpoint: str
    format: str
    kv_dtype: str = "f32"
    earlier: str = ""  # a file of an older version, which was read and written again


SNAPSHOTS = {
    "hybrid.wire-1": Saved("hybrid", "wire-1"),
    "hybrid.wire-2": Saved("hybrid", "wire-2"),
    "latent.wire-2": Saved("latent", "wire-2"),
    "hybrid.f32.moeflux-1": Saved("hybrid", "moeflux"),
    "latent.bf16.moeflux-1": Saved("latent", "moeflux", "bf16"),
    "hybrid.q8.moeflux-2": Saved("hybrid", "moeflux", "q8"),
    "latent.q8.moeflux-2": Saved("latent", "moeflux", "q8"),
    "windows.f32.moeflux-1": Saved("windows", "moeflux"),
    "windows.q8.moeflux-2": Saved("windows", "moeflux", "q8"),
    "windows.f32.moeflux-3": Saved("windows", "moeflux"),
    "windows.q8.moeflux-3": Saved("windows", "moeflux", "q8"),
    "hybrid.f32.moeflux-4": Saved("hybrid", "moeflux", "f32", "hybrid.f32.moeflux-1"),
    "latent.bf16.moeflux-4": Saved("latent", "moeflux", "bf16", "latent.bf16.moeflux-1"),
    "hybrid.q8.moeflux-4": Saved("hybrid", "moeflux", "q8", "hybrid.q8.moeflux-2"),
    "latent.q8.moeflux-4": Saved("latent", "moeflux", "q8", "latent.q8.moeflux-2"),
    "windows.f32.moeflux-4": Saved("windows", "moeflux", "f32", "windows.f32.moeflux-3"),
    "windows.q8.moeflux-4": Saved("windows", "moeflux", "q8", "windows.q8.moeflux-3"),
}
"""Those of an older version were written by the program of that time."""


def write_store(name: str, folder: Path) -> Path:
    """The plain store of a checkpoint, in folder/name. Its norms are those of the model that the sessions were saved
    with: rounded to bf16 where one is added to them, as mlx-lm still does it."""
    checkpoint, source = CHECKPOINTS[name](), folder / f"hf-{name}"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(checkpoint.config))
    (source / "model.safetensors").write_bytes(safetensors_bytes(checkpoint.tensors))
    exact, rounded = folder / f"exact-{name}", folder / "mlx" / source.name
    convert(source, exact, format=ConvertFormat.asked("bf16"), check="none")
    if checkpoint.config["model_type"] != "qwen3_next":
        return exact
    convert(write_mlx_folder(exact, rounded, rounded=True), folder / name, check="none")
    return folder / name


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    logits = {}
    if (FOLDER / "logits.npz").exists():
        with np.load(FOLDER / "logits.npz") as stored:
            logits = dict(stored)
    stores: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, saved in SNAPSHOTS.items():
            if name in logits:
                continue
            if saved.checkpoint not in stores:
                stores[saved.checkpoint] = write_store(saved.checkpoint, Path(temporary))
            store = stores[saved.checkpoint]
            session = moeflux.load(store, isa="portable").session(kv_dtype=saved.kv_dtype)
            if saved.earlier:
                session.restore(FOLDER / saved.earlier)
            else:
                session.prefill(TOKENS)
            snapshot = session.snapshot()
            snapshot.save(FOLDER / name, format=saved.format)
            logits[name] = steps(session, NEXT)
            if saved.kv_dtype == "f32":
                with moeflux.open_store(store) as weights:
                    truth = oracle_at(weights, snapshot).prefill(NEXT)
                assert np.abs(truth - logits[name]).max() < 1e-5 * np.ptp(truth)
            print(f"{name:24}{(FOLDER / name).stat().st_size:8} bytes")
    np.savez_compressed(FOLDER / "logits.npz", **logits)


if __name__ == "__main__":
    main()
