"""One thread: with more, tests on a busy machine wait for each other's threads, and sums may be cut otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.train.corpus import prepare
from tools.train.documents import read_documents, text_files
from tools.train.export import export
from tools.train.generate import write_corpus
from tools.train.loop import Training
from tools.train.tests.tiny import COURSE, TINY
from tools.train.tokenizer import save_tokenizer, train_tokenizer
from tools.train.windows import Data

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus, tokenizer and data."""
    folder = tmp_path_factory.mktemp("work")
    write_corpus(folder / "corpus" / "made.jsonl", 600, seed=1)
    files = text_files([folder / "corpus"])
    save_tokenizer(train_tokenizer(read_documents(files), 384, 2), folder / "tokenizer", 256)
    prepare([folder / "corpus"], folder / "tokenizer", folder / "data", 0.1)
    return folder


@pytest.fixture(scope="session")
def data(work: Path) -> Data:
    return Data(work / "data")


@pytest.fixture(scope="session")
def trained(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, stopped twice and taken up twice: before the experts are quantised and after."""
    folder = tmp_path_factory.mktemp("run")
    for stop in (8, 25, None):
        assert Training(data, TINY, folder, "cpu").run(stop) == (stop is None)
    return folder


@pytest.fixture(scope="session")
def folder(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("exported") / "tiny"
    assert export(trained, folder) == COURSE.steps
    return folder
