"""A system that refuses allocations and mappings while a server answers: see refusing/serving.py. Some calls of each
request are refused here, and every one in `make refusals`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import refusing

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("kind", ("memory", "mappings"))
def test_the_server_goes_on(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    most = 0 if request.config.getoption("--every-refusal") else 8
    life = [str(refusing.needed_library()), str(tmp_path), kind, str(most)]
    command = [sys.executable, "-X", "faulthandler", "-m", "refusing.serving", *life]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout)
    print(
        *(
            f"{name}: {made} calls, {tried} refused, {failed} answers failed"
            for name, (made, tried, failed) in counts.items()
        ),
        sep="\n",
    )
    assert counts["start"][0] > 0
    if kind == "memory":
        assert min(counts[name][0] for name in ("whole", "stream")) > 300
        assert 0 < counts["whole"][2] <= 2 * counts["whole"][1]
