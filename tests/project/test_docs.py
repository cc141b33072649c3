"""What the documents tell people to type works, and what they say it prints is what it prints.

A comment before a fenced block says what is done with it: `run` (a shell block runs in a folder that the blocks of the
document share, a Python block as a program there), `prints` (the output of the block before), or `parse` (the command
line accepts it; it needs files that a test does not have).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moeflux.cli import _parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *PAGES]
BLOCK = re.compile(r"^(?:<!-- (\w+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)[^)]*\)")
# Paths that the documents name: folders of ours, then anything without a placeholder.
PATH = re.compile(r"`((?:bench|csrc|docs|python|tests|tools|\.ci)/[\w./-]+)`")


def blocks(document: str) -> list[tuple[str, str, str]]:
    """(what to do, language, content)"""
    return BLOCK.findall((ROOT / document).read_text())


def test_every_shell_block_is_held_to_something() -> None:
    for document in DOCUMENTS:
        for action, language, content in blocks(document):
            if language in ("sh", "python"):
                assert action in ("run", "parse"), f"{document}: {content}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_parse(document: str) -> None:
    lines = [line for _, language, content in blocks(document) if language == "sh" for line in content.splitlines()]
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[0] == "moeflux", line
        try:
            _parser().parse_args(words[1:])
        except SystemExit as stop:
            pytest.fail(f"{document}: {line}: status {stop.code}")


@pytest.mark.parametrize("document", [page for page in DOCUMENTS if any(what == "run" for what, *_ in blocks(page))])
def test_it_runs(document: str, tmp_path: Path) -> None:
    if document == "docs/guides/several-machines.md":
        pytest.importorskip("ray")  # which there is not for every Python
    command = f"{shlex.quote(sys.executable)} -m moeflux"
    output = ""
    for action, language, content in blocks(document):
        if action == "run":
            program = (
                ["bash", "-ec", f'moeflux() {{ {command} "$@"; }}\n{content}']
                if language == "sh"
                else [sys.executable, "-W", "error", "-c", content]
            )
            run = subprocess.run(
                program, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "120"}
            )
            assert run.returncode == 0, run.stderr
            output = run.stdout
        elif action == "prints":
            assert output == content


def test_what_must_run_does() -> None:
    for document in (
        "README.md",
        *(f"docs/guides/{name}.md" for name in ("first-text", "service", "several-machines")),
    ):
        assert sum(action == "run" for action, _, _ in blocks(document)) >= 1, document


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    here = (ROOT / document).parent
    assert [link for link in LINK.findall(text) if not (here / link).exists()] == []
    planned = text.partition("\n## What is planned\n")[2]
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists() and path not in planned]
    assert missing == []


def test_every_command_is_in_the_contributing_table() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())
    text = (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "README.md").read_text()
    mentioned = set(re.findall(r"\bmake ([\w-]+)", text))
    assert targets - mentioned == {"help"}
    helped = set(re.findall(r"make ([\w-]+)", "\n".join(re.findall(r'@echo "(.*)"', makefile))))
    assert targets - helped == {"help"}


def test_what_a_report_is_asked_for_is_there() -> None:
    """The commands that issue templates name are ones that the command line takes."""
    texts = [path.read_text() for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))]
    named = {command for text in texts for command in re.findall(r"`moeflux ([^`]+)`", text)}
    assert {"--version", "doctor --quick"} <= named
    for command in named - {"--version"}:
        _parser().parse_args(shlex.split(command))
