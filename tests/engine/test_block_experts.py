"""A model whose experts are in GGUF's blocks: its store and its logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import FormatError, QuantFormat, _core, oracle
from moeflux.conversion.synth import synth
from moeflux.conversion.verify import verify
from moeflux.stores.packed import format_from_json, format_to_json
from moeflux.stores.storage import ConvertFormat
from moeflux.stores.store import Store, open_store
from support.engine import steps, tokens
from support.engine_logits import LARGEST_ORACLE_ERROR, assert_meets
from support.flat import changed
from support.small_variants import QWEN

WIDE = changed(QWEN, hidden_size=256, moe_intermediate=256, num_experts=8)


def made(folder: Path, name: str) -> Store:
    plain = QuantFormat.plain("BF16")
    synth(folder, WIDE, format=ConvertFormat(QuantFormat.blocks(name), plain))
    return open_store(folder)


def session(opened: Store, **options: object) -> moeflux.Session:
    engine = _core.Engine(opened.directory, **{"backend": "cpu", "threads": 1, "precision": "exact"} | options)
    return moeflux.Model(opened, engine).session(max_context=64)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "GGUF_MXFP4"])
def test_logits_are_those_of_the_oracle(tmp_path: Path, name: str) -> None:
    """With few slots and chunks, and with all experts in memory: the same bits."""
    ids = tokens(20)
    with made(tmp_path / "store", name) as opened:
        assert str(opened.directory.experts.formats.down) == name
        expected = oracle.Session(opened.variant, opened).prefill(ids)
        one = session(opened, chunk=7, expert_slots=6)
        found = np.concatenate([one.prefill(ids[:16], logits="all"), steps(one, ids[16:])])
        at_once = session(opened).prefill(ids, logits="all")
    assert_meets(found, expected, LARGEST_ORACLE_ERROR)
    assert np.array_equal(found, at_once)
    assert verify(tmp_path / "store").ok


def test_the_store_names_the_type(tmp_path: Path) -> None:
    for name in QuantFormat.block_types():
        format = QuantFormat.blocks(name)
        assert format_to_json(format) == {"element": name} and format_from_json({"element": name}, "here") == format
    with made(tmp_path / "store", "Q4_1"):
        pass
    path = tmp_path / "store" / "moeflux.json"
    said = json.loads(path.read_text())
    assert said["experts"]["up_proj"] == {"element": "Q4_1"}
    for wrong in ("Q4_J", "none", ""):
        said["experts"]["up_proj"] = {"element": wrong}
        path.write_text(json.dumps(said))
        with pytest.raises(FormatError, match="up_proj"):
            open_store(tmp_path / "store")
