"""What shells complete, asked of the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moeflux.cli import main

ASKS_BASH = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_moeflux
printf '%s\\n' "${COMPREPLY[@]}"
"""
ASKS_FISH = 'source $argv[1]; complete -C "$argv[2..]" | cut -f 1'


def completed(shell: str, script: Path, *words: str) -> set[str]:
    """What could stand in place of the last word."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    asks = [program, "-c", ASKS_BASH, "bash"] if shell == "bash" else [program, "-c", ASKS_FISH]
    found = subprocess.run([*asks, str(script), *words], capture_output=True, text=True, check=True)
    assert found.stderr == ""
    return set(found.stdout.split())


@pytest.fixture(params=["bash", "fish"])
def shell(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, Path]:
    assert main(["completion", request.param]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    return request.param, script


def test_commands_flags_and_values(shell: tuple[str, Path]) -> None:
    assert completed(*shell, "moeflux", "ve") == {"verify"}
    assert {"run", "chat", "serve", "completion"} <= completed(*shell, "moeflux", "")
    assert completed(*shell, "moeflux", "plan", "--tr") == {"--trace"}
    assert completed(*shell, "moeflux", "run", "--reads", "") == {"auto", "direct", "buffered"}
    assert completed(*shell, "moeflux", "chat", "--kv-dtype", "b") == {"bf16"}
    assert "codex" in completed(*shell, "moeflux", "launch", "co")


def test_other_values_are_left_to_the_names_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    assert completed("bash", script, "moeflux", "plan", "--trace", "") == set()
    assert completed("bash", script, "moeflux", "plan", "") >= {"--trace", "--json"}


def test_zsh_takes_what_bash_takes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    bash = capsys.readouterr().out
    main(["completion", "zsh"])
    start, _, rest = capsys.readouterr().out.partition("\n")
    assert rest == bash
    assert "bashcompinit" in start
