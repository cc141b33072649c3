"""Models by the name of a repository: downloaded once, gone on with where it stopped, refused before gigabytes come.

The real library talks to a server here that answers as the hub does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from golden import checkpoints
from moeflux import IoError, builtin
from moeflux.machine.remembered import Probe, remember
from moeflux.models.hub import find_model
from support.checkpoint_folder import edit_config
from support.stand_in_hub import COMMIT, Hub, called, called_in_turn, program_of, refused, serving


def fetch(hub: Hub, home: Path, name: str) -> None:
    program_of(hub, home, "-c", "import sys; from moeflux.models.hub import find_model; find_model(sys.argv[1])", name)


QUESTION = ["-p", "What is the capital of France?", "--temperature", "0"]
ANSWER = b"The capital of France is Paris.\n"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as server:
        yield server


def test_a_repository_is_downloaded_once_and_found_without_a_network(hub: Hub, tmp_path: Path) -> None:
    first = called(hub, tmp_path, "test/model", *QUESTION)
    assert (first.stdout, first.returncode) == (ANSWER, 0), first.stderr.decode()
    assert "test/model: downloading" in first.stderr.decode()
    count = len(hub.fetched)
    assert count == sum(file.is_file() for file in builtin.path().rglob("*")) - 1  # all but the list of sources
    again = called(hub, tmp_path, "test/model", *QUESTION)
    assert again.stdout == ANSWER and len(hub.fetched) == count and b"downloading" not in again.stderr
    alone = called(None, tmp_path, "test/model", *QUESTION)
    assert alone.stdout == ANSWER and "looking for an earlier download" in alone.stderr.decode()


WATCHED = """
from contextlib import contextmanager
from moeflux.models.hub import find_model

class Told:
    @contextmanager
    def task(self, label, total, unit="bytes"):
        print(label, total, unit)
        yield self

    def advance(self, done):
        print(done, flush=True)

    def note(self, sentence):
        pass

find_model("test/model", Told())
print("done", flush=True)
"""


def test_a_download_shows_our_bar_and_no_other(hub: Hub, tmp_path: Path) -> None:
    """The weights stop half way until their progress has been told. The variable makes the library draw its bars even
    without a terminal."""
    weights = builtin.path() / "model_weights.bin"
    halt = hub.halts[weights.name] = threading.Event()
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
    environment |= {"HF_HUB_DISABLE_XET": "1", "TQDM_POSITION": "-1"}
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        label, total, unit = run.stdout.readline().split()
        assert (label, unit) == ("test/model", "bytes") and int(total) > weights.stat().st_size
        assert 0 <= int(run.stdout.readline()) < int(total)
        halt.set()
        said = run.stdout.read().split()
        assert said[-1] == "done" and run.stderr.read() == ""


LOADED = """
import moeflux, sys
for names in (*([name] for name in sys.argv[1:]), []):
    try:
        with moeflux.load(*names, threads=1) as model:
            print(model.path)
    except moeflux.NotFoundError as error:
        print(error, file=sys.stderr)
"""


def test_load_takes_what_the_command_line_takes(hub: Hub, tmp_path: Path) -> None:
    run = program_of(hub, tmp_path, "-c", LOADED, "test/model", "test/model@main", "nowhere")
    *found, builtin_model = run.stdout.decode().splitlines()
    assert [Path(path).name for path in found] == [COMMIT, COMMIT] and Path(builtin_model) == builtin.path()
    assert run.stderr.decode().startswith("nowhere: expected a folder, a GGUF file or a repository")


def test_planning_fetches_the_config_alone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFLUX_CACHE", str(tmp_path / "cache"))
    remember(Path(), Probe(2e9, 2e10, "direct", 2, 1_769_472, datetime(2026, 2, 3, tzinfo=timezone.utc)))
    calls = [[command, "test/model"] for command in ("info", "plan", "bench")]
    *runs, none = called_in_turn(hub, tmp_path, *calls, ["plan", "test/none"])
    assert {file for file, _ in hub.fetched} == {"config.json"}
    for run in runs:
        assert run.returncode == 0, run.stderr.decode()
        said = run.stdout.decode()
        assert "with every matrix" in said and builtin.path().name not in said
    refused(none, "found neither such a folder")


def test_what_was_downloaded_is_measured(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path, "test/model")
    count = len(hub.fetched)
    for server in (hub, None):
        run = program_of(server, tmp_path, "-m", "moeflux", "bench", "test/model", "--prefill", "4", "--decode", "1")
        assert run.returncode == 0, run.stderr.decode()
        assert "prefill  cold" in run.stdout.decode() and len(hub.fetched) == count


def test_a_download_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    shutil.copytree(builtin.path(), folder)
    (folder / "large.safetensors").write_bytes(bytes(24 << 20))  # the library keeps pieces of 10 MiB
    hub.repositories["test/large"] = folder
    hub.breaks["large.safetensors"] = 15 << 20
    fetch(hub, tmp_path, "test/large")
    run = called(hub, tmp_path, "test/large", *QUESTION)
    assert run.stdout == ANSWER
    asked = [asked for file, asked in hub.fetched if file == "large.safetensors"]
    assert len(asked) == 2 and asked[0] == ""
    assert asked[1].startswith("bytes=") and int(asked[1][6:].split("-")[0]) > 0


def test_a_published_checkpoint_runs_as_it_is(hub: Hub, tmp_path: Path) -> None:
    """Without the copies of its weights that other programs have in the same repository."""
    folder = checkpoints.write("qwen3_moe", tmp_path / "hf")
    words = ("--raw", "-p", "Once", "--temperature", "0", "--max-tokens", "8", "--threads", "1")
    expected = called(None, tmp_path, str(folder), *words)
    assert expected.returncode == 0 and expected.stdout, expected.stderr.decode()
    with_copies = shutil.copytree(folder, tmp_path / "with copies")
    for copy in ("original/model.safetensors", "consolidated.safetensors", "metal/model.bin"):
        (with_copies / copy).parent.mkdir(exist_ok=True)
        (with_copies / copy).write_bytes(bytes(100))
    hub.repositories["test/published"] = with_copies
    for server in (hub, None):
        run = called(server, tmp_path / "home", "test/published", *words)
        assert (run.stdout, run.returncode) == (expected.stdout, 0), run.stderr.decode()
        assert (b"downloading" in run.stderr) == (server is not None)
    assert {file for file, _ in hub.fetched} == {file.name for file in folder.iterdir()}


def test_a_published_checkpoint_is_planned_as_it_is(hub: Hub, tmp_path: Path) -> None:
    """What converting would make of it is another question, which its config.json answers."""
    folder = hub.repositories["test/published"] = checkpoints.write("qwen3_moe", tmp_path / "hf")
    here, there, info, planned, config = called_in_turn(
        hub,
        tmp_path / "home",
        ["info", str(folder), "--json"],
        ["info", "test/published", "--json"],
        ["info", "test/published"],
        ["plan", "test/published"],
        ["plan", str(folder / "config.json")],
    )
    sizes = [json.loads(run.stdout)["routed_bytes"] for run in (here, there)]
    assert sizes[0] == sizes[1] and {file for file, _ in hub.fetched} == {"config.json"}
    for run in (info, planned):
        assert "the checkpoint as it is published, with every matrix BF16" in run.stdout.decode(), run.stderr.decode()
    assert "every matrix 4-bit g64" in config.stdout.decode()


def test_what_does_not_run_here_is_refused_before_it_is_fetched(hub: Hub, tmp_path: Path) -> None:
    words = {
        "broken": "config.json",
        "dense": "llama",
        "nothing": "expected weights (config.json and *.safetensors), GGUF files or a packed store",
    }
    configs = {"broken": {"model_type": "qwen3_moe"}, "dense": {"model_type": "llama"}}
    for name in words:
        folder = hub.repositories[f"test/{name}"] = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(1000))
        if name in configs:
            (folder / "config.json").write_text(json.dumps(configs[name]))
    runs = called_in_turn(hub, tmp_path / "home", *(["run", f"test/{name}", *QUESTION] for name in words))
    for run, expected in zip(runs, words.values(), strict=True):
        refused(run, expected)
    assert {file for file, _ in hub.fetched} == {"config.json"}


def test_what_needs_converting_says_so_before_it_is_fetched(hub: Hub, tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    cases = [
        ("deepseek_v2", None, "a checkpoint of deepseek_v2"),
        ("qwen3_moe", fp8, "a checkpoint of qwen3_moe"),
        ("qwen3_moe", {"quant_method": "eetq"}, "found 'eetq'"),
    ]
    for i, (name, quantised, _) in enumerate(cases):
        folder = hub.repositories[f"test/full-{i}"] = checkpoints.write(name, tmp_path / f"hf-{i}")
        if quantised is not None:
            edit_config(folder, quantization_config=quantised)
    runs = called_in_turn(hub, tmp_path / "home", *(["run", f"test/full-{i}", *QUESTION] for i in range(len(cases))))
    for run, (_, _, words) in zip(runs, cases, strict=True):
        refused(run, words)
        assert (b"then `moeflux convert` makes a store of it" in run.stderr) == ("eetq" not in words)
    assert {file for file, _ in hub.fetched} == {"config.json"}


def test_names_of_nothing(hub: Hub, tmp_path: Path) -> None:
    none, private = called_in_turn(
        hub, tmp_path, *(["run", f"{name}/model", *QUESTION] for name in ("none", "private"))
    )
    refused(none, "found neither such a folder nor such a repository")
    refused(private, "its owner must be asked first")
    refused(called(None, tmp_path, "test/model", *QUESTION), "huggingface.co cannot be reached")


def test_folders_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert find_model("owner/name") == Path("owner/name")
    assert find_model(None) == builtin.path()
    with pytest.raises(IoError, match=r"nowhere: expected a folder, a GGUF file or .* as owner/name, found nothing"):
        find_model("nowhere")
    (tmp_path / "some" / "where").mkdir(parents=True)
    assert find_model("./some/where") == Path("some/where")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(IoError, match=r'owner/name: found no such folder; .*: pip install "moeflux\[hub\]"'):
        find_model("owner/name")
