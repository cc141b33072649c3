"""Real agents solve a task in two steps through our server: python tests/agents/run.py FOLDER [AGENT ...]

The built-in model cannot do what they ask, so a script says what it says, token by token, through the same parsers and
streams. Everything on the other side of the socket is theirs. The agents are installed in FOLDER (npm, 1.1 GB), and
`moeflux launch` starts them without a terminal, in a scratch folder, with a home of their own and next to nothing of
the environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import moeflux
from moeflux import builtin
from moeflux.text.tokenizer import shared_length

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from support.live_server import Live, live  # noqa: E402

TASK = "Write hello.txt and show it."
HELLO = "hello from the model\n"
DONE = "hello.txt says hello."
CONTEXT = 1 << 20  # what agents send first is longer than the built-in model's context, and nothing is evaluated here


@dataclass(frozen=True)
class Agent:
    package: str
    words: list[str]  # for the task
    calls: Callable[[str], list[tuple[str, dict[str, object]]]]  # that the model makes, for the folder of the task


AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code@2.1.330",
        ["-p", TASK, "--allowedTools", "Write,Bash"],
        lambda folder: [
            ("Write", {"file_path": f"{folder}/hello.txt", "content": HELLO}),
            ("Bash", {"command": "cat hello.txt", "description": "Shows it"}),
        ],
    ),
    "codex": Agent(
        "@openai/codex@0.169.0",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
        lambda folder: [
            ("exec_command", {"cmd": f"printf '%s\\n' '{HELLO.strip()}' > hello.txt"}),
            ("exec_command", {"cmd": "cat hello.txt"}),
        ],
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        ["run", TASK],
        lambda folder: [
            ("write", {"filePath": f"{folder}/hello.txt", "content": HELLO}),
            ("bash", {"command": "cat hello.txt", "description": "Shows it"}),
        ],
    ),
}


def main(folder: Path, names: list[str]) -> int:
    if shutil.which("npm") is None:
        print("agents: no npm here, so no agent was run")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    packages = [AGENTS[name].package for name in names]
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", *packages], cwd=folder, check=True)
    with moeflux.load(builtin.path(), threads=1) as model, live(model) as server:
        server.desk.context = CONTEXT
        return 1 if [name for name in names if not solves(AGENTS[name], name, folder.resolve(), server)] else 0


def solves(agent: Agent, name: str, folder: Path, server: Live) -> bool:
    """Runs the agent, and prints what it came to."""
    server.scheduler.seen.clear()
    with tempfile.TemporaryDirectory(dir=folder) as home, tempfile.TemporaryDirectory(dir=folder) as work:
        subprocess.run(["git", "init", "--quiet", work], check=True)
        server.scheduler.script = script(agent.calls(work))
        path = f"{folder}/node_modules/.bin:{os.environ['PATH']}"
        launch = [sys.executable, "-m", "moeflux", "launch", name, "--port", server.url.rpartition(":")[2]]
        run = subprocess.run(
            [*launch, "--", *agent.words], cwd=work, env={"PATH": path, "HOME": home},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        written = Path(work) / "hello.txt"
        solved = run.returncode == 0 and written.exists() and written.read_text() == HELLO and DONE in run.stdout
    print(f"{name}: {'solved' if solved else 'FAILED'}, status {run.returncode}")
    if not solved:
        print(run.stdout[-2000:], run.stderr[-2000:], sep="\n")
    before: list[int] = []
    for handle, _ in server.scheduler.seen:
        said = server.scheduler.script(server.desk.tokenizer.decode(handle.prompt)) or ""
        found = shared_length(before, handle.prompt)
        print(f"  prompt of {len(handle.prompt)} tokens, {found} as the request before and its answer; {handle.finish}")
        before = [*handle.prompt, *server.desk.tokenizer.encode_marked(said)]
    return solved


def script(calls: list[tuple[str, dict[str, object]]]) -> Callable[[str], str]:
    """One call after the other; the results of earlier ones tell how far it is."""

    def say(prompt: str) -> str:
        if "<tool_call>" not in prompt:  # not the task: agents have titles made
            return "A title"
        done = prompt.count("<tool_response>\n")
        if done >= len(calls):
            return f"Done: {DONE}"
        name, arguments = calls[done]
        return f'Next.\n<tool_call>{{"name": "{name}",  "arguments": {json.dumps(arguments)}}}</tool_call>'

    return say


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(AGENTS)))
