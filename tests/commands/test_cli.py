"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import moeflux
from golden import checkpoints
from moeflux import PRESETS, FormatError, __version__
from moeflux.cli import arguments, main
from support.command_line import commands

Output = pytest.CaptureFixture[str]


# ---- Versions ---------------------------------------------------------------------------------------------------


def test_version(capsys: Output) -> None:
    assert main(["--version"]) == 0
    text = capsys.readouterr().out
    assert re.fullmatch(
        rf"moeflux {re.escape(__version__)}, commit ([0-9a-f]{{12}}\+?|unknown), CPU kernels for .*portable.*\n", text
    )


# ---- Loading ----------------------------------------------------------------------------------------------------


def test_what_is_given_of_the_loading_options_goes_to_load() -> None:
    """Every option is one of load's own, so that none is dropped on the way. Options not given are left to load."""
    parser = argparse.ArgumentParser()
    arguments.add_loading(parser)
    assert arguments.load_options(parser.parse_args([])) == {}
    given = ["--threads", "3", "--look-ahead", "off", "--verify-reads"]
    assert arguments.load_options(parser.parse_args(given)) == {"threads": 3, "look_ahead": "off", "verify_reads": True}
    names = {action.dest for action in parser._actions} - {"help"}
    assert names <= set(moeflux.LoadOptions.__annotations__)
    every = {"choices": lambda action: action.choices[0], "type": lambda action: "2"}
    line: list[str] = []
    for action in parser._actions[1:]:
        line.append(action.option_strings[0])
        line += [value(action) for attribute, value in every.items() if getattr(action, attribute)]
    assert set(arguments.load_options(parser.parse_args(line))) == names


# ---- Errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("inof", "moeflux: COMMAND: expected run, .*, found 'inof'; did you mean info\\?"),
        ("help", "moeflux: COMMAND: expected run, .*, found 'help'; did you mean --help\\?"),
        ("--verson info", "moeflux: expected a flag that --help lists, found --verson; did you mean --version\\?"),
        ("info --jsn", "moeflux info: expected a flag that --help lists, found --jsn; did you mean --json\\?"),
        ("trace --ouput=x", "moeflux trace: expected a flag .* found --ouput; did you mean --output\\?"),
        ("info --zebra", "moeflux info: expected a flag that --help lists, found --zebra"),
        ("info a b", "moeflux info: expected no more words, found 'b'"),
        ("info -- a -b", "moeflux info: expected no more words, found '-b'"),
        ("run What is this?", "moeflux run: expected no more words, found 'is'; give a prompt with -p"),
        ("convert one", "moeflux convert: the following arguments are required: DEST"),
        (
            "convert a b --bits 7",
            "moeflux convert: --bits: expected 2, 3, .* found '7'; MLX has no codes of 7 bits, take 6 or 8",
        ),
        ("convert a b --bits 9", "moeflux convert: --bits: expected 2, 3, 4, 5, 6, 8, q8_0, .* or bf16, found '9'"),
        ("convert a b --group-size 63", "moeflux convert: --group-size: expected 32, 64, 128, found 63"),
        ("run --cache lur", "moeflux run: --cache: expected lru, lfu, none, found 'lur'; did you mean lru\\?"),
        ("run --seed -1", "moeflux run: --seed: expected a whole number of at least 0, found -1"),
        ("run --seed 1.5", "moeflux run: --seed: expected a whole number, found '1.5'"),
        (
            "run --seed 18446744073709551616",
            "moeflux run: --seed: .* of at most 18446744073709551615, found \\d+",
        ),
        (
            f"run --top-k {'9' * 5000}",
            "moeflux run: --top-k: .* of at most 2147483647, found 9{40}",
        ),
        ("run --threads 0", "moeflux run: --threads: expected a whole number of at least 1, found 0"),
        ("run --temperature hot", "moeflux run: --temperature: expected a number, found 'hot'"),
        ("run --logit-bias=-3=1", "moeflux run: --logit-bias: expected a whole number of at least 0, found -3"),
        ("trace x -o y --seed -1", "moeflux trace: --seed: expected a whole number of at least 0, found -1"),
        (
            "synth x --variant a3b --layers -2",
            "moeflux synth: --layers: .* of at least 1, found -2",
        ),
        ("eval --text x --overlap -1", "moeflux eval: --overlap: expected a whole number of at least 0, found -1"),
        ("run -p", "moeflux run: -p/--prompt: expected one argument"),
        ("doctor --quick --metal", "moeflux doctor: --metal: not allowed with argument --quick"),
        ("bench x --prefill 3 --prompt-ids y", "moeflux bench: --prompt-ids: not allowed with argument --prefill"),
    ],
)
def test_a_wrong_call_is_a_line_that_says_why(line: str, said: str, capsys: Output) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(f"{said}\n", err), err


def test_every_flag_that_takes_a_number_says_what_it_takes(capsys: Output) -> None:
    """The message has our own words, not Python's."""
    flags = [
        (name, parser, action.option_strings[0])
        for name, parser in commands().items()
        for action in parser._actions
        if action.option_strings and action.nargs is None and action.type not in (None, str, Path)
    ]
    assert len(flags) > 60
    for name, parser, flag in flags:
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([flag, "many"])
        err = capsys.readouterr().err
        assert re.fullmatch(rf"moeflux {name}: (-\w/)?{flag}(/--[\w-]+)?: expected .*, found 'many'\n", err), err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run -p x --logprobs 2", "--logprobs: expected --json with it"),
        ("run -p x --thinking on", "thinking: expected a template that lets one choose, found .* never thinks"),
        ("run -p x --raw --thinking off", "--thinking: expected a model with a chat template and no --raw"),
        ("chat --thinking on", "thinking: expected a template that lets one choose"),
        (
            "run -p x --raw --reasoning-effort low",
            "--reasoning-effort: expected a model with a chat template and no --raw",
        ),
        ("run -p x --reasoning-effort low", "reasoning_effort: expected a template that has it, found one without"),
        ("chat --reasoning-effort high", "reasoning_effort: expected a template that has it, found one without"),
        ("trace x -o y --prompt-ids z --seed 3", "--seed: expected random tokens, found --prompt-ids"),
        ("doctor --metal /", "--metal: expected no folder with it, found /"),
        ("doctor --cuda /", "--cuda: expected no folder with it, found /"),
    ],
)
def test_no_flag_is_passed_over_in_silence(line: str, said: str, capsys: Output) -> None:
    words = line.split()
    assert main(words) == 2
    assert re.search(said, sentence(capsys.readouterr().err, words[0]))


def sentence(err: str, command: str) -> str:
    """The one line that an error is."""
    assert err.startswith(f"moeflux {command}: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


def test_a_missing_target_is_one_sentence(capsys: Output) -> None:
    assert main(["info", "nowhere"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nowhere" in sentence(err, "info")
    assert all(name in err for name in PRESETS)


def test_a_bad_config_names_file_and_field(tmp_path: Path, capsys: Output) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3_5_moe"}')
    assert main(["info", str(config)]) == 2
    assert str(config) in sentence(capsys.readouterr().err, "info")
    config.write_text('{"model_type": ')
    assert main(["info", str(config)]) == 2
    assert "line 1" in sentence(capsys.readouterr().err, "info")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (PermissionError(13, "Permission denied", "/x"), 2, "[Errno 13] Permission denied: '/x'"),
        (FormatError("a.bin: expected 2,\nfound 3"), 2, "a.bin: expected 2, found 3"),
    ],
)
def test_errors_of_the_user_and_the_system(
    error: BaseException, status: int, text: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(target: str) -> None:
        raise error

    monkeypatch.setattr("moeflux.measure.info.describe", fail)
    assert main(["info", "x"]) == status
    assert sentence(capsys.readouterr().err, "info") == f"moeflux info: {text}\n"


def test_a_defect_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeflux.measure.info.describe", lambda target: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["info", "x"])


def test_a_closed_pipe_is_silent() -> None:
    program = "import sys; from moeflux.cli import main; sys.stdin.read(); sys.exit(main(['info', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()  # before the program writes: it waits for the end of its input
        run.stdin.close()
        assert run.stderr.read() == b""
    assert run.returncode == 141


# ---- info -------------------------------------------------------------------------------------------------------


def test_info_of_this_machine(capsys: Output) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert __version__ in text
    assert "metal               absent: " in text
    assert main(["info", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)
    assert machine["version"] == __version__
    assert machine["memory_bytes"] > 2**28
    assert machine["cpus"] >= 1
    assert machine["presets"] == list(PRESETS)


def test_info_of_a_preset_with_experts_in_mxfp4(capsys: Output) -> None:
    assert main(["info", "gpt-oss-20b"]) == 0
    printed = capsys.readouterr().out
    assert "10.15 GB: 768 x 13.22 MB" in printed
    assert printed.endswith("a conversion with experts in MXFP4 and every other matrix BF16\n")


def test_info_of_a_preset_with_heads_of_two_sizes(capsys: Output) -> None:
    assert main(["info", "gemma-4"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "attention 16 heads x 256, 8 kv heads, the last 1024 rows" in lines
    assert "attention 16 heads x 512, 2 kv heads" in lines
    assert "rope vanilla, theta 1e+06, 128 of 512 dimensions" in lines


def test_info_of_a_preset(capsys: Output) -> None:
    """The published figures of the model, in words and in exact bytes."""
    assert main(["info", "a17b"]) == 0
    text = capsys.readouterr().out
    assert "217.43 GB: 30720 x 7.08 MB" in text
    assert main(["info", "a17b", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["expert_bytes"], info["routed_bytes"]) == (7_077_888, 217_432_719_360)
    assert info["expert_bytes_per_token"] == 7_077_888 * 10 * 60
    assert info["variant"]["feed_forwards"][0]["count"] == 512


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_fp8", "qwen3_vl_moe", "kimi_k25"])
def test_info_of_a_checkpoint_is_that_of_its_conversion(name: str, tmp_path: Path, capsys: Output) -> None:
    source, packed = checkpoints.write(name, tmp_path / "hf"), tmp_path / "packed"
    assert main(["convert", str(source), str(packed), "--verify", "none"]) == 0
    capsys.readouterr()
    infos = []
    for folder in (source, packed):
        assert main(["info", str(folder), "--json"]) == 0
        infos.append(json.loads(capsys.readouterr().out))
    before, after = infos
    assert (before["kind"], after["kind"]) == ("hf", "packed")
    own = ("target", "kind", "fingerprint", "dropped", "missing")
    shape = {key: value for key, value in after["variant"].items() if key != "name"}
    assert {key: value for key, value in before["variant"].items() if key != "name"} == shape
    for key in before.keys() - {*own, "variant"}:
        assert before[key] == after[key], key
    assert main(["info", str(source)]) == 0
    text = capsys.readouterr().out
    assert "missing             a conversion: `moeflux convert` makes a store" in text
    assert "not used            " in text


# ---- convert ----------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple, dict]]:
    """What `moeflux.conversion.convert.convert` was called with."""
    seen: list[tuple[tuple, dict]] = []

    class Done:
        plan = SimpleNamespace(needed=0)

        def __str__(self) -> str:
            return "done"

    monkeypatch.setattr(
        "moeflux.conversion.convert.convert", lambda *args, **keywords: seen.append((args, keywords)) or Done()
    )
    return seen


def test_convert_without_flags(calls: list[tuple[tuple, dict]], capsys: Output) -> None:
    assert main(["convert", "a", "b"]) == 0
    assert capsys.readouterr().out == "done\n"
    (((source, dest), keywords),) = calls
    assert (source, dest) == (Path("a"), Path("b"))
    assert keywords["format"] is None
    assert (keywords["force"], keywords["dry_run"], keywords["check"]) == (False, False, "quick")


@pytest.mark.parametrize(
    ("flags", "declared", "expected"),
    [
        (["--bits", "4"], "bfloat16", "experts 4-bit g64, others 4-bit g64"),
        (["--bits", "3", "--dense-bits", "6", "--group-size", "32"], "bfloat16", "experts 3-bit g32, others 6-bit g32"),
        (["--bits", "bf16"], "bfloat16", "experts BF16, others BF16"),
        (["--group-size", "128"], "float16", "experts 4-bit g128 F16 scales, others 4-bit g128 F16 scales"),
        (["--dense-bits", "BF16"], "bfloat16", "experts 4-bit g64, others BF16"),
    ],
)
def test_convert_formats(
    flags: list[str], declared: str, expected: str, calls: list[tuple[tuple, dict]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": declared}))
    assert main(["convert", str(tmp_path), "b", *flags]) == 0
    assert str(calls[0][1]["format"]) == expected


def test_convert_switches(calls: list[tuple[tuple, dict]]) -> None:
    assert main(["convert", "a", "b", "--force", "--dry-run", "--verify", "full"]) == 0
    keywords = calls[0][1]
    assert (keywords["force"], keywords["dry_run"], keywords["check"]) == (True, True, "full")


# ---- From checkpoint to verified store ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted from a tiny checkpoint, by the command."""
    root = tmp_path_factory.mktemp("cli")
    checkpoints.write("qwen3_moe", root / "checkpoint")
    assert main(["convert", str(root / "checkpoint"), str(root / "store"), "--bits", "4"]) == 0
    return root / "store"


def test_a_dry_run_writes_nothing(store: Path, tmp_path: Path, capsys: Output) -> None:
    assert main(["convert", str(store.parent / "checkpoint"), str(tmp_path / "new"), "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("\ndry run: nothing was written\n")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_does_not_fit(
    store: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert main(["convert", str(store.parent / "checkpoint"), str(tmp_path / "new"), "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out.endswith("\ndry run: nothing was written, and it would not fit\n")
    assert re.search(r"new: expected \d+ bytes free on this disk \(.*\), found 1000 ", sentence(err, "convert"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["convert", "synth"])
def test_an_interrupted_command_names_what_is_kept(
    command: str, store: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ["--config", str(store.parent / "checkpoint")] if command == "synth" else []
    argv = [command, *([] if source else [str(store.parent / "checkpoint")]), str(tmp_path / "new"), *source]
    with monkeypatch.context() as patch:

        def press(*ignored: object) -> None:
            raise KeyboardInterrupt

        patch.setattr("moeflux.conversion.packer.Packer.describe", press)
        assert main(argv) == 130
    err = capsys.readouterr().err
    kept = tmp_path / "new.partial"
    assert err == f"{kept} keeps what is done; the same command goes on from there\nmoeflux {command}: interrupted\n"
    assert kept.is_dir()
    assert main(argv) == 0
    assert main(["verify", str(tmp_path / "new")]) == 0


def test_an_existing_store_is_not_overwritten(store: Path, capsys: Output) -> None:
    assert main(["convert", str(store.parent / "checkpoint"), str(store)]) == 2
    assert "--force" in sentence(capsys.readouterr().err, "convert")


def test_info_of_a_store(store: Path, capsys: Output) -> None:
    assert main(["info", str(store), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    layer_files = sum(file.stat().st_size for file in (store / "packed_experts").glob("*.bin"))
    assert (info["kind"], info["routed_bytes"]) == ("packed", layer_files)
    assert main(["info", str(store)]) == 0
    assert info["fingerprint"] in capsys.readouterr().out


def test_verify_finds_the_flipped_bit(store: Path, capsys: Output) -> None:
    assert main(["verify", str(store)]) == 0
    assert "every checksum agrees" in capsys.readouterr().out
    main(["info", str(store), "--json"])
    expert_bytes = json.loads(capsys.readouterr().out)["expert_bytes"]
    file = store / "packed_experts" / "layer_01.bin"
    data = bytearray(file.read_bytes())
    data[2 * expert_bytes + 5] ^= 1
    file.write_bytes(data)
    assert main(["verify", str(store)]) == 1
    assert "layer_01.bin" in capsys.readouterr().out
    assert main(["verify", str(store), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [(each["layer"], each["expert"]) for each in report["problems"]] == [(1, 2)]
    data[2 * expert_bytes + 5] ^= 1
    file.write_bytes(data)
    assert main(["verify", str(store)]) == 0


def test_verify_of_nothing(tmp_path: Path, capsys: Output) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "found nothing" in sentence(capsys.readouterr().err, "verify")


# ---- synth --------------------------------------------------------------------------------------------------------


def test_synth_makes_the_model_that_the_flags_describe(store: Path, tmp_path: Path, capsys: Output) -> None:
    config = store.parent / "checkpoint" / "config.json"
    flags = [
        "--layers",
        "2",
        "--vocab",
        "128",
        "--experts",
        "6",
        "--experts-per-token",
        "3",
        "--bits",
        "3",
        "--seed",
        "7",
    ]
    assert main(["synth", str(tmp_path / "new"), "--config", str(config), *flags, "--dense-bits", "bf16"]) == 0
    assert "seed 7" in capsys.readouterr().out
    assert main(["info", str(tmp_path / "new"), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    variant = info["variant"]
    assert (len(variant["layers"]), variant["vocab_size"]) == (2, 128)
    (experts,) = variant["feed_forwards"]
    assert (experts["count"], experts["per_token"]) == (6, 3) and "lossy" not in variant
    assert info["expert_format"] == "3-bit g64"
    assert list(info["formats"]) == ["BF16"]
    assert main(["verify", str(tmp_path / "new")]) == 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--variant", "a3b", "--experts", "4"], "per_token"),
        (["--variant", "a3b", "--layers", "0"], "layers"),
        (["--variant", "nothing"], "Qwen3.6-35B-A3B"),
        (["--config", "/nowhere/config.json"], "/nowhere/config.json"),
    ],
)
def test_synth_refuses_an_impossible_model(flags: list[str], text: str, tmp_path: Path, capsys: Output) -> None:
    assert main(["synth", str(tmp_path / "new"), *flags]) == 2
    assert text in sentence(capsys.readouterr().err, "synth")
    assert list(tmp_path.iterdir()) == []


def test_synth_needs_one_model() -> None:
    assert main(["synth", "x"]) == 2
    assert main(["synth", "x", "--variant", "a3b", "--config", "y"]) == 2
