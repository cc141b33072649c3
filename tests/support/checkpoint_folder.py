"""Changes to a checkpoint on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from golden.checkpoint import safetensors_bytes

WORDS = {"I32": "<i4", "U32": "<u4", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "F8_E4M3": "u1", "U8": "u1"}


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, change: object) -> None:
    """Applies `change` to the tensors {name: (dtype, array)} of a checkpoint, and makes one shard of them."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                words = data[start + begin : start + end]
                array = np.frombuffer(words, WORDS[entry["dtype"]]).reshape(entry["shape"])
                tensors[name] = (entry["dtype"], array.copy())
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
