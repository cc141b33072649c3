"""Every file that Python opens, with something else in its place: a pipe, a device, a directory, a file of terabytes.

Only moeflux.files opens files (tests/formats/test_files.py). This is about what the other modules make of its errors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import moeflux
from golden import checkpoints
from moeflux.cli import run, terminal_chat
from moeflux.conversion.convert import content_of, convert
from moeflux.conversion.destination import reserved
from moeflux.conversion.journal import JOURNAL
from moeflux.conversion.packer import Packer
from moeflux.conversion.verify import verify
from moeflux.errors import Error
from moeflux.machine import remembered
from moeflux.measure import reading
from moeflux.measure.info import describe
from moeflux.models import builtin
from moeflux.models.config import variant_from_config
from moeflux.models.hub import find_model
from moeflux.routing import hit_rates
from moeflux.routing.trace import Trace
from moeflux.runtime.snapshot import Snapshot
from moeflux.runtime.tokens import read_prompt
from moeflux.stores.store import open_store
from moeflux.text.chat import ChatFormat
from moeflux.text.sampling import Sampling
from moeflux.text.tokenizer import Tokenizer, end_tokens
from support.engine import Folder, folders
from support.hostile_paths import HOSTILE, NO_PATHS, impatience

__all__ = ["impatience"]  # a fixture, for every test here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folders(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def model() -> Iterator[moeflux.Model]:
    yield moeflux.load(builtin.path(), threads=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "hf")


# ---- Files of a model's folder ----------------------------------------------------------------------------------


def text_files(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    end_tokens(folder, tokenizer)
    Sampling.default(folder)
    ChatFormat.from_folder(folder, tokenizer)


OF_A_FOLDER: dict[str, Callable[[Path], Any]] = {
    "tokenizer.json": text_files,
    "tokenizer_config.json": text_files,
    "generation_config.json": text_files,
    "chat_template.jinja": text_files,
    "chat_template.json": text_files,
    "config.json": variant_from_config,
    "moeflux.json": open_store,
    "model_weights.json": open_store,
    "model_weights.bin": open_store,
    "packed_experts/layer_00.bin": open_store,
}


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """The built-in model's small files."""
    for path in builtin.path().iterdir():
        if path.is_file() and path.stat().st_size < 4 << 20:
            shutil.copy(path, tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", OF_A_FOLDER)
def test_a_file_of_a_model(name: str, kind: str, folder: Folder, text_folder: Path, tmp_path: Path) -> None:
    target = text_folder
    if OF_A_FOLDER[name] is open_store:
        target = shutil.copytree(folder("qwen3_moe"), tmp_path / "store")
    if name == "chat_template.json":
        (target / "chat_template.jinja").unlink(missing_ok=True)
    make, words = HOSTILE[kind]
    make(target / name)
    if name == "model_weights.bin" and kind == "huge":  # what lies behind the last tensor is `verify`'s to find
        open_store(target).close()
        return
    with pytest.raises(Error, match=f"{Path(name).name}.*({words}|found something else)"):
        OF_A_FOLDER[name](target)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["config.json", "model_weights.bin", "packed_experts/layer_00.bin", "moeflux.json"])
def test_verify(name: str, kind: str, folder: Folder, tmp_path: Path) -> None:
    store = shutil.copytree(folder("qwen3_moe"), tmp_path / "store")
    HOSTILE[kind][0](store / name)
    report = verify(store)
    assert [problem for problem in map(str, report.problems) if Path(name).name in problem]
    assert report.bytes == 0


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "tokenizer.json", "merges.txt"],
)
def test_the_source_of_a_conversion(name: str, kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """Refused, or, where a companion is no file at all, left out."""
    source = shutil.copytree(checkpoint, tmp_path / "hf")
    make, words = HOSTILE[kind]
    make(source / name)
    if name in ("tokenizer.json", "merges.txt") and kind != "huge":
        assert name not in convert(source, tmp_path / "store", check="none").plan.copied
        return
    with pytest.raises(Error, match=f"{name}.*({words}|byte 4398046511104)"):
        convert(source, tmp_path / "store", check="none")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "huge"])
@pytest.mark.parametrize("name", [JOURNAL, "model_weights.bin", "packed_experts/layer_01.bin"])
def test_where_a_conversion_writes(name: str, kind: str, checkpoint: Path, tmp_path: Path) -> None:
    partial = tmp_path / "store.partial"
    (partial / name).parent.mkdir(parents=True)
    HOSTILE[kind][0](partial / name)
    with (
        pytest.raises(Error, match=f"{Path(name).name}: expected a regular file, found"),
        contextlib.closing(content_of(checkpoint, None)) as content,
        contextlib.closing(Packer(content, partial)) as packer,
    ):
        packer.begin()


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_lock(kind: str, tmp_path: Path) -> None:
    make, _ = HOSTILE[kind]
    make(tmp_path / "store.lock")
    if kind == "huge":  # left behind, by whomever
        with reserved(tmp_path / "store"):
            assert (tmp_path / "store.lock").stat().st_size < 1000
        return
    with pytest.raises(Error, match=r"store\.lock: expected a regular file, found"), reserved(tmp_path / "store"):
        pass


# ---- Files that a user names ------------------------------------------------------------------------------------


def same_store(path: str) -> None:
    """For `verify`, which of a folder that is none reports what it found."""
    if verify(path).ok:
        return
    raise Error(f"{path}: no store")


CALLS: dict[str, Callable[[moeflux.Model, str], Any]] = {
    "restore": lambda model, path: model.session().restore(path),
    "snapshot": lambda model, path: Snapshot.load(path, model.variant),
    "save a session": lambda model, path: model.session().snapshot().save(path),
    "load a conversation": lambda model, path: model.chat().load(path),
    "trace": lambda model, path: Trace.load(path),
    "prompt ids": lambda model, path: read_prompt(path, 10),
    "text to evaluate": lambda model, path: reading.read_text(path),
    "prompt": lambda model, path: run.read_prompt(None, path),
    "config": lambda model, path: variant_from_config(path),
    "store": lambda model, path: open_store(path),
    "load": lambda model, path: moeflux.load(path),
    "convert": lambda model, path: convert(path, "nowhere"),
    "verify": lambda model, path: same_store(path),
    "info": lambda model, path: describe(path),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", CALLS)
def test_a_file_that_a_user_names(name: str, kind: str, model: moeflux.Model, tmp_path: Path) -> None:
    path = HOSTILE[kind][0](tmp_path / "given")
    if name == "save a session" and kind == "huge":
        pytest.skip("a file of any length may be replaced")
    with pytest.raises(Error, match="given"):
        CALLS[name](model, str(path))


@pytest.mark.parametrize("kind", NO_PATHS)
@pytest.mark.parametrize("name", CALLS)
def test_a_path_that_can_be_none(name: str, kind: str, model: moeflux.Model, tmp_path: Path) -> None:
    given = NO_PATHS[kind]
    with pytest.raises(Error):
        CALLS[name](model, given if kind in ("NUL", "nothing") else f"{tmp_path}/none/{given}")


@pytest.mark.parametrize("name", NO_PATHS)
def test_a_model_by_a_name_that_can_be_none(name: str) -> None:
    with pytest.raises(Error):
        moeflux.load(find_model(NO_PATHS[name]))


# ---- Files of the cache, which count as absent ------------------------------------------------------------------


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_remembered(kind: str, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the cache keeps a model from being loaded."""
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path))
    store = folder("qwen3_moe")
    with open_store(store) as opened:
        doctors = remembered.file_of(remembered.identity(Path(opened.expert_files[0])))
        hits = hit_rates._file(opened.fingerprint)
    make, _ = HOSTILE[kind]
    for path in (doctors, hits, tmp_path / "chat_history"):
        make(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        moeflux.load(store, expert_slots=8, threads=1)
    if kind != "huge":
        with terminal_chat._line_editing(True):
            pass
    assert os.path.lexists(tmp_path / "chat_history")
