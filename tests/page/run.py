"""The page in a real Chromium: python tests/page/run.py [--where-possible] FOLDER [WORDS OF A TEST]

A script says what the model says, slowly enough to watch it come. Chromium and what drives it are installed in FOLDER
(npm, 90 MB); pictures of the page lie there afterwards, to be looked at. With --where-possible, a machine that cannot
have them says so, and that is no failure.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import moeflux
from moeflux import builtin
from moeflux.errors import Error
from moeflux.serve.experts import Watch
from moeflux.serve.guard import Rules
from moeflux.text.generate import Piece

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from support.live_server import live  # noqa: E402
from support.stand_in_scheduler import StandInHandle  # noqa: E402

PACKAGES = ["@sparticuz/chromium@153.0.0", "playwright-core@1.65.1"]
INSTALL = 100  # seconds: where nobody answers, tests must not wait for long
NO_BROWSER = 3  # the status of drive.mjs
SECONDS_A_TOKEN = 0.004
KEY = "a key of the server"
CONTEXT = 1 << 20  # nothing is evaluated here

MARKDOWN = """## How experts are chosen

A **router** looks at every token and picks a few *experts* of many. Only those are computed, so a model can know much \
more than it takes to write one word. Three things follow:

1. Memory is for what is **needed again**, and the rest stays on the disk.
2. Reading has to begin early.
   - `read_ahead` says how many.
   - What is read in vain costs time.
3. Nothing may depend on luck.

```python
def hit_rate(hits: int, misses: int) -> float:
    # The share of experts that were in memory.
    return hits / max(hits + misses, 1)
```

| budget | experts in memory | tokens a second |
|:--|--:|--:|
| 4 GiB | 12 % | 3.1 |
| 8 GiB | 38 % | 9.8 |
| 16 GiB | 100 % | 41.0 |

> A plan is made before any memory is taken.

More is [in the plan](https://example.org/plan).
"""

HOSTILE = """Hostile begins <script>window.broken = 1</script> <img src=x onerror="window.broken = 2">
<svg onload="window.broken = 3"><iframe srcdoc="<script>parent.broken = 4</script>"></iframe>

[one](javascript:window.broken=5) [two](JaVaScRiPt:window.broken=6) [three](data:text/html,<script>alert(1)</script>)
![four](https://example.org/spy.png) <a href="javascript:window.broken=7">five</a> [six]( javascript:window.broken=8)
[seven](https://example.org/"onmouseover="window.broken=9) [eight](vbscript:x) **<b onclick=window.broken=10>nine</b>**

```"><img src=x onerror=window.broken=11>
</code></pre><script>window.broken = 12</script>
```

| <style>*{display:none}</style> | `<script>window.broken = 13</script>` |
|--|--|
| <object data="javascript:window.broken=14"> | <form action="https://example.org"><button>ten</button></form> |

# <base href="https://example.org/"> <meta http-equiv="refresh" content="0;url=https://example.org">
Hostile ends"""

SAYS = {
    "markdown": MARKDOWN,
    "hostile": HOSTILE,
    "long": " ".join(f"Sentence {number} of many is written here." for number in range(400)),
    "think": "<think>First I weigh **both** sides.\n\nThen I choose one.</think>It is the second one.",
    "weather": 'I will look.\n<tool_call>{"name": "weather", "arguments": {"city": "Bern", "days": 2}}</tool_call>',
    "<tool_response>": "In Bern it is sunny.",
    "short": "A short answer.",
}


def say(prompt: str) -> str:
    """What belongs to the word that came last."""
    if "broken" in prompt:
        raise Error("the disk: expected bytes, found none")
    word = max(SAYS, key=prompt.rfind)
    return SAYS[word] if word in prompt else "Yes."


def slow_down() -> None:
    """Every token takes a while, and needs experts of which some are not there."""
    told = StandInHandle.say

    def say_slowly(handle: StandInHandle, piece: Piece) -> None:
        time.sleep(SECONDS_A_TOKEN)
        stats = handle.stats
        missed = (stats.tokens * 7) % 5
        handle.stats = replace(
            stats,
            expert_hits=stats.expert_hits + 32 - missed,
            expert_misses=stats.expert_misses + missed,
            bytes_read=stats.bytes_read + missed * 393216,
        )
        told(handle, piece)

    StandInHandle.say = say_slowly  # type: ignore[method-assign]


def pick_experts() -> None:
    """A model of 40 layers with 128 experts, of which a few are picked far more often than the others."""
    rng = np.random.default_rng(1)
    liked = rng.permuted(np.tile(1 / np.arange(1, 129) ** 1.2, (40, 1)), axis=1)
    counts = np.zeros((40, 128), int)

    def look(watch: Watch) -> dict[str, object]:
        counts[:] += rng.poisson(8 * liked)
        return {"layers": list(range(3, 43)), "counts": counts.tolist()}

    Watch.look = look  # type: ignore[method-assign]


def missing(folder: Path) -> str | None:
    """Installs what is not there yet. Returns why that cannot be."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"its Chromium is for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    if shutil.which("npm") is None:
        return "there is no npm here"
    folder.mkdir(parents=True, exist_ok=True)
    if all((folder / "node_modules" / package.rpartition("@")[0]).is_dir() for package in PACKAGES):
        return None
    quiet = ["--no-audit", "--no-fund", "--silent", "--fetch-retries=0", "--fetch-timeout=30000"]
    try:
        install = ["npm", "install", "--prefix", ".", *quiet, *PACKAGES]
        done = subprocess.run(install, cwd=folder, check=False, timeout=INSTALL)
    except subprocess.TimeoutExpired:
        return f"npm has not installed its packages within {INSTALL} s"
    return None if done.returncode == 0 else "npm could not install its packages"


def main(folder: Path, words: list[str], where_possible: bool) -> int:
    if why := missing(folder):
        print(f"page: {why}, so nothing looked at the page")
        return 0 if where_possible else 1
    slow_down()
    pick_experts()
    with (
        moeflux.load(builtin.path(), threads=1, sessions=2, expert_slots=64) as model,
        live(model) as server,
        live(model, rules=Rules(keys=[KEY])) as locked,
    ):
        for each in (server, locked):
            each.desk.context = CONTEXT
            each.scheduler.script = say
        drive = Path(__file__).with_name("drive.mjs")
        command = ["node", drive, folder.resolve(), server.url, locked.url, KEY, " ".join(words)]
        environment = {**os.environ, "TMPDIR": str(folder.resolve())}  # where Chromium is unpacked
        status = subprocess.run(command, env=environment, check=False, timeout=300).returncode
    if status == NO_BROWSER and where_possible:
        print("page: Chromium does not start here, so nothing looked at the page")
        return 0
    return status


if __name__ == "__main__":
    where_possible = "--where-possible" in sys.argv
    folder, *words = [word for word in sys.argv[1:] if word != "--where-possible"]
    sys.exit(main(Path(folder), words, where_possible))
