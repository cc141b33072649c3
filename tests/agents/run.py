"""Real agents solve a task in two steps through our server: python tests/agents/run.py FOLDER [AGENT ...]

The built-in model cannot do what they ask, so a script says what it says, token by token, through the same parsers and
streams. Everything on the other side of the socket is theirs. The agents are installed in FOLDER (npm, 1.1 GB; Aider
from PyPI, 0.7 GB, into an environment of its own), and run without a terminal, in a scratch folder, with a home of
their own and next to nothing of the environment. `moeflux launch` starts those that it knows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
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


Script = Callable[[str], str]
"""What the model says to a prompt."""


@dataclass(frozen=True)
class Agent:
    package: str  # of npm, or with == of PyPI
    words: list[str]  # for the task
    script: Callable[[str], Script]  # for the folder of the task


def calls(*made: tuple[str, dict[str, object]]) -> Script:
    """One call after the other; the results of earlier ones tell how far it is."""

    def say(prompt: str) -> str:
        if "<tool_call>" not in prompt:  # not the task: agents have titles made
            return "A title"
        done = prompt.count("<tool_response>\n")
        if done >= len(made):
            return f"Done: {DONE}"
        name, arguments = made[done]
        return f'Next.\n<tool_call>{{"name": "{name}",  "arguments": {json.dumps(arguments)}}}</tool_call>'

    return say


def files(prompt: str) -> str:
    """Aider has no tools: the model writes whole files, and hears what a command says of them. The first is wrong."""
    said, text = (DONE, HELLO) if "Expected a greeting" in prompt else ("I write it.", "hello\n")
    return f"{said}\n\nhello.txt\n```\n{text}```\n"


TEST = f"""sh -c "grep -qx '{HELLO.strip()}' hello.txt || {{ echo Expected a greeting; exit 1; }}" """

AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code@2.1.330",
        ["-p", TASK, "--allowedTools", "Write,Bash"],
        lambda folder: calls(
            ("Write", {"file_path": f"{folder}/hello.txt", "content": HELLO}),
            ("Bash", {"command": "cat hello.txt", "description": "Shows it"}),
        ),
    ),
    "codex": Agent(
        "@openai/codex@0.169.0",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
        lambda folder: calls(
            ("exec_command", {"cmd": f"printf '%s\\n' '{HELLO.strip()}' > hello.txt"}),
            ("exec_command", {"cmd": "cat hello.txt"}),
        ),
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        ["run", TASK],
        lambda folder: calls(
            ("write", {"filePath": f"{folder}/hello.txt", "content": HELLO}),
            ("bash", {"command": "cat hello.txt", "description": "Shows it"}),
        ),
    ),
    "aider": Agent(
        "aider-chat==0.86.2",
        ["--message", TASK, "--auto-test", "--test-cmd", TEST, "hello.txt"],
        lambda folder: files,
    ),
}


def main(folder: Path, names: list[str]) -> int:
    npm = [AGENTS[name].package for name in names if "==" not in AGENTS[name].package]
    if npm and shutil.which("npm") is None:
        print("agents: no npm here, so no agent was run")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    if npm:
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", *npm], cwd=folder, check=True)
    for name in names:
        if "==" in AGENTS[name].package:
            if not (folder / name / "bin/python").exists():
                venv.create(folder / name, with_pip=True)
            install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", AGENTS[name].package]
            subprocess.run([folder / name / "bin/python", *install], check=True)
    with moeflux.load(builtin.path(), threads=1) as model, live(model) as server:
        server.desk.context = CONTEXT
        return 1 if [name for name in names if not solves(AGENTS[name], name, folder.resolve(), server)] else 0


def solves(agent: Agent, name: str, folder: Path, server: Live) -> bool:
    """Runs the agent, and prints what it came to."""
    server.scheduler.seen.clear()
    with tempfile.TemporaryDirectory(dir=folder) as home, tempfile.TemporaryDirectory(dir=folder) as work:
        subprocess.run(["git", "init", "--quiet", work], check=True)
        server.scheduler.script = agent.script(work)
        path = f"{folder}/node_modules/.bin:{os.environ['PATH']}"
        run = subprocess.run(
            [*started(name, folder, server), *agent.words], cwd=work, env={"PATH": path, "HOME": home},
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


def started(name: str, folder: Path, server: Live) -> list[str]:
    """By `moeflux launch`, or with the address on its command line."""
    if name != "aider":
        return [sys.executable, "-m", "moeflux", "launch", name, "--port", server.url.rpartition(":")[2], "--"]
    address = ["--openai-api-base", f"{server.url}/v1", "--openai-api-key", "none", "--model", "openai/builtin"]
    alone = ["--no-git", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-gitignore"]
    return [f"{folder}/aider/bin/aider", *address, *alone, "--edit-format", "whole", "--yes-always", "--no-pretty"]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or list(AGENTS)))
