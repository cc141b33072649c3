"""What a newcomer sees first: text at once, the same text with experts on the disk, and what that cost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "tools" / "demo.py"


def test_the_demo_streams_and_says_so() -> None:
    run = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True, check=False, timeout=900)
    assert run.returncode == 0, run.stderr
    first, again, answer = re.findall(r"^\$ moeflux run .*\n((?:.|\n)+?)\n\n(?=\$|Now|Next)", run.stdout, re.MULTILINE)
    assert first == again and first.startswith(" lived in a village by the sea.")
    assert answer == "The capital of France is Paris."
    [budget] = set(re.findall(r"--memory '(\d+ MB)'", run.stdout))
    assert f"Now with {budget} for" in run.stdout
    slots, experts = map(int, re.search(r"room for (\d+) of the (\d+) experts", run.stdout).groups())
    assert 16 <= slots < experts / 2
    found = re.findall(r"experts: ([\d.]+) MB read, ([\d.]+)% found in memory", run.stderr)
    (whole, _), (streamed, hits), (_, _) = ((float(size), float(share)) for size, share in found)
    assert streamed > 3 * whole and hits < 90
