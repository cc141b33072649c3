"""A type checker accepts the programs that README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def complaints(folder: Path, *files: Path) -> str:
    """Of mypy --strict, run where no settings lie."""
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder / "cache"), *map(str, files)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return "" if run.returncode == 0 else run.stdout + run.stderr


def test_programs_of_the_readme_have_types(tmp_path: Path) -> None:
    programs = PYTHON_BLOCK.findall((ROOT / "README.md").read_text())
    assert len(programs) >= 2
    files = [tmp_path / f"program_{place}.py" for place in range(len(programs))]
    for file, program in zip(files, programs, strict=True):
        file.write_text(program)
    assert complaints(tmp_path, *files) == ""
    (tmp_path / "wrong.py").write_text("import moeflux\nmoeflux.load('x').session().prefill([1]).argmix()\n")
    assert '"Logits" has no attribute "argmix"' in complaints(tmp_path, tmp_path / "wrong.py")
