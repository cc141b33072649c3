"""A type checker accepts the programs that README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "mypy-tests"
"""What mypy has learnt of packages serves the next run. It looks whether a file is still the same."""
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all programs, where no settings lie."""
    return tmp_path_factory.mktemp("programs")


def complaints(folder: Path, *files: Path) -> str:
    """Of mypy --strict."""
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(CACHE / "programs"), *map(str, files)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return "" if run.returncode == 0 else run.stdout + run.stderr


def test_programs_of_the_readme_have_types(folder: Path) -> None:
    programs = PYTHON_BLOCK.findall((ROOT / "README.md").read_text())
    assert len(programs) >= 2
    files = [folder / f"program_{place}.py" for place in range(len(programs))]
    for file, program in zip(files, programs, strict=True):
        file.write_text(program)
    assert complaints(folder, *files) == ""
    (folder / "wrong.py").write_text("import moeflux\nmoeflux.load('x').session().prefill([1]).argmix()\n")
    assert '"Logits" has no attribute "argmix"' in complaints(folder, folder / "wrong.py")


PROGRAM = """\
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import moeflux


def served(folder: Path, options: moeflux.LoadOptions) -> str:
    try:
        with moeflux.load(folder, **options) as model, model.session(max_context=512) as session:
            answer: moeflux.Completion = session.complete("Hello", max_tokens=3, timeout=1.5)
            print(answer.upper(), answer.finish, answer.stats.tokens_per_second, [p.logprob for p in answer.pieces])
            reply = model.chat(system="Be kind.").ask("Who?")
            return reply.text + answer
    except moeflux.BudgetError as error:
        return str(error.needed)


async def spoken(session: moeflux.Session) -> AsyncIterator[str]:
    generation: moeflux.Generation = session.generate([1, 2, 3])
    async for piece in generation:
        yield piece.text


served(Path("x"), {"memory": "8GB", "reads": "direct", "sessions": 2})
print(moeflux.plan("a3b", memory=None, kv_dtype="bf16").tokens_per_second)
"""


def test_a_program_of_a_user_has_types(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    assert complaints(folder, folder / "program.py") == ""
    (folder / "wrong.py").write_text(
        "import moeflux\nmoeflux.load('x', memry='8GB')\nmoeflux.plan('x', reads='mapped')\n"
    )
    said = complaints(folder, folder / "wrong.py")
    assert 'Unexpected keyword argument "memry"' in said and 'Argument "reads"' in said


def test_the_package_has_types() -> None:
    """mypy, as strict as pyproject.toml says, over the package and its stubs."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(CACHE / "package")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
