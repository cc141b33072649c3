"""GGUF files of a repository: the one model that is asked for is downloaded, and a choice is never guessed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from golden import checkpoints
from moeflux.errors import FormatError, NotFoundError
from moeflux.models.gguf_choice import asked_of, choose_gguf
from support import gguf_files
from support.stand_in_hub import Hub, called, called_in_turn, program_of, refused, serving

WORDS = ("--raw", "-p", "Once", "--temperature", "0", "--max-tokens", "8", "--threads", "1")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two types of the same model, one of them in parts in a folder, with what lies beside such files."""
    folder = tmp_path_factory.mktemp("repository")
    gguf_files.write("qwen3_moe", folder / "Tiny-Q8_0.gguf", type="Q8_0")
    gguf_files.write("qwen3_moe", folder / "UD-Q4_K_M" / "Tiny-UD-Q4_K_M.gguf", type="Q4_0", parts=40)
    for name in ("mmproj-F16.gguf", "Tiny-imatrix.gguf", "README.md", "config.json"):
        (folder / name).write_bytes(b"{}")
    return folder


@pytest.fixture(scope="module")
def answer(repository: Path) -> Callable[[str], bytes]:
    """What a file says where it lies."""

    @lru_cache
    def answer_of(file: str) -> bytes:
        run = called(None, repository, str(repository / file), *WORDS)
        assert run.returncode == 0 and run.stdout, run.stderr.decode()
        return run.stdout

    return answer_of


def fetched(hub: Hub) -> set[str]:
    return {file for file, _ in hub.fetched}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("test/tiny:Q8_0", "Tiny-Q8_0.gguf"),
        ("test/tiny:q8_0@main", "Tiny-Q8_0.gguf"),
        ("test/tiny/Tiny-Q8_0.gguf", "Tiny-Q8_0.gguf"),
        ("test/tiny:UD-Q4_K_M", "UD-Q4_K_M/Tiny-UD-Q4_K_M-00001-of-00002.gguf"),
        ("test/tiny/UD-Q4_K_M/Tiny-UD-Q4_K_M-00002-of-00002.gguf", "UD-Q4_K_M/Tiny-UD-Q4_K_M-00001-of-00002.gguf"),
    ],
)
def test_the_file_that_is_asked_for_runs_and_no_other_is_fetched(
    name: str, file: str, hub: Hub, repository: Path, answer: Callable[[str], bytes], tmp_path: Path
) -> None:
    hub.repositories["test/tiny"] = repository
    parts = {str(each.relative_to(repository)) for each in (repository / file).parent.glob("*-0000?-of-*.gguf")}
    for server in (hub, None) if "-of-" in file else (hub,):  # then without a network
        run = called(server, tmp_path / "home", name, *WORDS)
        assert (run.stdout, run.returncode) == (answer(file), 0), run.stderr.decode()
        assert (b"downloading" in run.stderr) == (server is not None)
    assert fetched(hub) == (parts if "-of-" in file else {file})


def test_one_model_needs_no_choice(hub: Hub, repository: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(repository, tmp_path / "one")
    shutil.rmtree(folder / "UD-Q4_K_M")
    hub.repositories["test/one"] = folder
    hub.architectures["test/one"] = "qwen3moe"
    first = called(hub, tmp_path / "home", "test/one", *WORDS)
    assert first.returncode == 0 and first.stdout, first.stderr.decode()
    assert fetched(hub) == {"Tiny-Q8_0.gguf"}
    planned = program_of(None, tmp_path / "home", "-m", "moeflux", "info", "test/one")
    assert planned.returncode == 0 and b"Q8_0" in planned.stdout, planned.stderr.decode()


def test_several_models_are_listed_and_none_is_fetched(hub: Hub, repository: Path, tmp_path: Path) -> None:
    hub.repositories["test/tiny"] = hub.repositories["test/other"] = repository
    hub.architectures["test/other"] = "qwen3"
    size = "Q8_0 (2.24 MB)"
    words = {
        "test/tiny": f"test/tiny: expected one model in GGUF, found 2; behind test/tiny, name one of :{size}, :UD-Q4",
        "test/tiny:Q6_K": "test/tiny:Q6_K: expected the name of one model in GGUF, found none of that name; behind",
        "test/tiny/Q8_0.gguf": "test/tiny/Q8_0.gguf: expected the name of one model in GGUF, found none of that name",
        "test/tiny:mmproj": "found none of that name",
        "test/other:Q8_0": "expected GGUF files of one of deepseek2, ",
    }
    calls = [["run", name, *WORDS] for name in words]
    *runs, planned = called_in_turn(hub, tmp_path, *calls, ["plan", "test/tiny:Q8_0"])
    for run, expected in zip(runs, words.values(), strict=True):
        refused(run, expected)
    refused(planned, "found GGUF files alone")
    refused(called(None, tmp_path, "test/tiny:Q8_0", *WORDS), "huggingface.co cannot be reached")
    assert fetched(hub) == set()


def test_weights_of_another_kind_come_first(hub: Hub, repository: Path, tmp_path: Path) -> None:
    folder = checkpoints.write("qwen3_moe", tmp_path / "both")
    shutil.copy(repository / "Tiny-Q8_0.gguf", folder)
    hub.repositories["test/both"] = folder
    assert called(hub, tmp_path / "home", "test/both", *WORDS).returncode == 0
    assert "Tiny-Q8_0.gguf" not in fetched(hub)
    hub.fetched.clear()
    assert called(hub, tmp_path / "home", "test/both:Q8_0", *WORDS).returncode == 0
    assert fetched(hub) == {"Tiny-Q8_0.gguf"}


def chosen(name: str, *files: str) -> list[str]:
    asked = asked_of(name)
    assert asked is not None
    return choose_gguf(asked, dict.fromkeys(files, 1000))


def test_tags_end_the_names_of_files_or_of_their_folders() -> None:
    files = ("x-Q4_K_M.gguf", "x-UD-Q4_K_M.gguf", "x.i1-IQ4_XS.gguf", "x-bf16.gguf", "MXFP4_MOE/x.gguf", "x.TQ1_0.gguf")
    for tag, file in zip(("q4_k_m", "UD-Q4_K_M", "IQ4_XS", "BF16", "MXFP4_MOE", "TQ1_0"), files, strict=True):
        assert chosen(f"a/b:{tag}", *files) == [file]
    with pytest.raises(FormatError, match=r"found 2; behind a/b, name one of /x/m-Q8_0.gguf [(]1.00 kB[)], /y/m-Q8_0"):
        chosen("a/b:Q8_0", "x/m-Q8_0.gguf", "y/m-Q8_0.gguf")
    with pytest.raises(NotFoundError, match=r"a/b/m-00001-of-00003.gguf: expected 3 parts, found 2"):
        chosen("a/b", "m-00001-of-00003.gguf", "m-00003-of-00003.gguf")


def test_names() -> None:
    for name, found in (
        ("a/b", ("a/b", None, None, None)),
        ("a/b@refs/pr/1", ("a/b", None, None, "refs/pr/1")),
        ("a/b:Q4_K_M@main", ("a/b", "Q4_K_M", None, "main")),
        ("a/b/c/d-Q4.gguf@v1", ("a/b", None, "c/d-Q4.gguf", "v1")),
    ):
        asked = asked_of(name)
        assert asked is not None and (asked.repository, asked.tag, asked.file, asked.revision) == found
    for name in ("a", "a/b/c", "a/b:", "a/b/../x.gguf/", "/a/b.gguf", "a//b.gguf", "./a/b.gguf"):
        assert asked_of(name) is None
