"""The built-in model with other tokens in place of those that it has: what it says itself is nonsense."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeflux import builtin

__all__ = ["remade"]


def remade(folder: Path, replaced: Mapping[str, str], ends: Sequence[str], template: str) -> Path:
    """`replaced` are tokens by those whose places they take; all of them are special. The first of the `ends` is the
    one that tokenizer_config.json names."""
    source = builtin.path()
    for file in source.iterdir():
        if not file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            os.symlink(file, folder / file.name)
    values: dict[str, Any] = json.loads((source / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        if token["content"] in replaced:
            token.update(content=replaced[token["content"]], special=True)
    values["model"]["vocab"] = {replaced.get(piece, piece): id for piece, id in values["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(values))
    ids = {token["content"]: token["id"] for token in values["added_tokens"]}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[end] for end in ends]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": ends[0]}))
    (folder / "chat_template.jinja").write_text(template)
    return folder
