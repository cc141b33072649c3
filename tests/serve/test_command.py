"""`moeflux serve` and `moeflux launch` as programs."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moeflux.cli import main
from moeflux.cli.launch import AGENTS
from moeflux.cli.serve import AGENT_NAMES, MODULES, served_name
from moeflux.models import builtin

Output = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]
MOEFLUX = [sys.executable, "-m", "moeflux"]
FRANCE = {"role": "user", "content": "What is the capital of France?"}
PARIS = "The capital of France is Paris."
PATIENCE = 120.0


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    said: list[str]  # before it was ready, and the three lines

    def ask(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        with connection.getresponse() as answer:
            found = answer.status, answer.read().decode()
        connection.close()
        return found

    def chat(self, *messages: dict[str, str]) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt were cached."""
        body = {"messages": list(messages), "max_tokens": 20, "temperature": 0}
        status, text = self.ask("/v1/chat/completions", body)
        assert status == 200, text
        answer = json.loads(text)
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@contextmanager
def serving(*words: str) -> Iterator[Server]:
    command = [*MOEFLUX, "serve", "--port", "0", "--threads", "1", "--sessions", "2", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said: list[str] = []
            while not (ready := re.fullmatch(r"ready: http://127\.0\.0\.1:(\d+)\n", said[-1] if said else "")):
                said.append(process.stderr.readline())
                assert said[-1], said
            said += [process.stderr.readline() for _ in range(3)]
            yield Server(process, int(ready[1]), said)
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def refused(words: list[str], said: str, capsys: Output, before: str = "") -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(f"{before}moeflux {words[0]}: {said}\n", err), err


# ---- serve ------------------------------------------------------------------------------------------------------


def test_it_says_what_it_takes_and_how_to_ask_and_ends_when_it_is_told(tmp_path: Path) -> None:
    with serving("--disk", str(tmp_path / "states"), "--name", "small") as server:
        assert any("2 x " in line for line in server.said[:-4]), "the plan"
        curl, python, agent = server.said[-3:]
        assert "curl " in curl and "openai" in python and "claude" in agent
        assert server.chat(FRANCE) == (PARIS, 0)
        assert json.loads(server.ask("/v1/models")[1])["data"][0]["id"] == "small"
        server.process.send_signal(signal.SIGTERM)
        _, rest = server.process.communicate(timeout=PATIENCE)
        assert rest == "" and server.process.returncode in (0, -signal.SIGTERM)
    assert list((tmp_path / "states").glob("*.session")), "what is in memory goes to the disk at the end"


def test_what_is_on_disk_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    states, first = tmp_path / "states", ({"role": "system", "content": "Be kind. " * 40}, FRANCE)
    words = ("--disk", str(states), "--idle-seconds", "0")
    with serving(*words) as server:
        answer, cached = server.chat(*first)
        assert cached == 0
        end = time.monotonic() + PATIENCE
        while len(list(states.glob("*.session"))) < 2:  # of the instructions, and of the answer
            assert time.monotonic() < end
            time.sleep(0.01)
        server.process.kill()
        assert server.process.wait(PATIENCE) == -signal.SIGKILL
    (states / ".half-written").write_bytes(b"x")
    with serving(*words) as server:
        again = ({"role": "assistant", "content": answer}, {"role": "user", "content": "And of Spain?"})
        _, cached = server.chat(*first, *again)
        assert cached > 64, "at least the instructions"


def test_what_readme_shows_works() -> None:
    programs = re.findall(r"^```py\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    with serving("--no-disk") as server:
        for program in programs:
            program = program.replace("http://127.0.0.1:8080", f"http://127.0.0.1:{server.port}")
            run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
            assert run.returncode == 0 and (run.stdout == f"{PARIS}\n" or "Anthropic" in program), run.stderr


def test_a_second_ctrl_c_ends_it_at_once() -> None:
    with serving("--no-disk") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        body = {"messages": [FRANCE], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        assert b"data: " in answer.readline()
        server.process.send_signal(signal.SIGINT)
        while server.ask("/health")[0] == 200:
            pass
        server.process.send_signal(signal.SIGINT)
        try:
            rest = answer.read()
        except http.client.IncompleteRead as error:
            rest = error.partial
        connection.close()
        assert b"[DONE]" not in rest
        server.process.wait(PATIENCE)


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-long-secret\n")
    with serving("--no-disk", "--api-key-file", str(tmp_path / "keys")) as server:
        assert server.ask("/v1/models")[0] == 401
        assert server.ask("/v1/models", Authorization="Bearer a-long-secret")[0] == 200
        assert all("KEY" in line and "secret" not in line for line in server.said[-3:])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve --host 0.0.0.0", r"host: expected a loopback address, or a key .*, found '0\.0\.0\.0'"),
        ("serve --port 70000", "--port: expected a whole number of at most 65535, found 70000"),
        ("serve --disk x --no-disk", "--no-disk: expected no folder with it, found --disk x"),
        ("serve --name it's", r"--name: expected letters, digits and \._/:@-, found .*"),
        ("serve --api-key-file /nowhere", "/nowhere: .*"),
        ("serve nowhere --port 0", "nowhere: .*"),
        ("serve --no-disk --port 0 --memory 1MB", ".*"),
        ("launch nobody", "AGENT: expected claude, codex, opencode, found 'nobody'"),
        ("launch claude a b", "expected no more words, found 'b'; MODEL stands beside AGENT, .*"),
    ],
)
def test_a_wrong_call_is_a_line(line: str, said: str, capsys: Output) -> None:
    refused(line.split(), said, capsys)


def test_without_the_packages_it_says_which(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr("moeflux.cli.serve.MODULES", ("starlette", "no_such_package"))
    said = r'expected the packages of a server, found no no_such_package: pip install "moeflux\[serve\]"'
    refused(["serve"], said, capsys)
    refused(["launch", "claude"], said, capsys)


def test_whoever_serves_nobody_needs_none_of_them() -> None:
    without = f"import sys; sys.modules.update(dict.fromkeys({MODULES}))"
    line = f"{without}; from moeflux import cli; cli.main(['run', '-p', 'Hello', '-n', '1', '--threads', '1'])"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_names(tmp_path: Path) -> None:
    assert served_name(None) == "builtin"
    assert served_name("mlx-community/Qwen3.6-35B-A3B-4bit") == "mlx-community/Qwen3.6-35B-A3B-4bit"
    assert served_name(str(tmp_path / "it's mine")) == "it-s-mine"
    assert served_name(str(builtin.path()) + "/.") == builtin.path().name


@contextmanager
def another_program(said: bytes) -> Iterator[int]:
    """Says this to whoever comes first."""

    def answer() -> None:
        with listening.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        yield int(listening.getsockname()[1])
        thread.join()


# ---- launch -----------------------------------------------------------------------------------------------------

AGENT = """\
#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
sys.exit(3)
"""


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with the names of agents, which print what they are told and end with status 3."""
    for name in AGENT_NAMES:
        program = tmp_path / name
        program.write_text(AGENT.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of the user")
    monkeypatch.setenv("NO_PROXY", "corp.example")
    monkeypatch.delenv("no_proxy", raising=False)


def told(*words: str) -> tuple[list[str], dict[str, str], str]:
    run = subprocess.run([*MOEFLUX, "launch", *words], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert run.returncode == 3, run.stderr
    given, environment = json.loads(run.stdout)
    return given, environment, run.stderr


@pytest.mark.usefixtures("agents")
def test_agents_are_told_of_the_server_that_there_is() -> None:
    assert tuple(AGENTS) == AGENT_NAMES
    with serving("--no-disk") as server:
        port, url = str(server.port), f"http://127.0.0.1:{server.port}"
        words, environment, said = told("claude", "--port", port, "--", "-p", "hello")
        assert words == ["-p", "hello"] and "ANTHROPIC_API_KEY" not in environment
        assert (environment["NO_PROXY"], environment["no_proxy"]) == ("corp.example,127.0.0.1",) * 2
        assert (environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_MODEL"]) == (url, "builtin")
        assert "agents begin with about 10000" in said
        words, environment, _ = told("codex", "--port", port, "--", "exec", "hello")
        assert words[-2:] == ["exec", "hello"] and environment["MOEFLUX_API_KEY"] == "x"
        assert f'model_providers.moeflux.base_url="{url}/v1"' in words and 'model="builtin"' in words
        words, environment, _ = told("opencode", "--port", port)
        config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
        assert words == [] and config["model"] == "moeflux/builtin"
        assert config["provider"]["moeflux"]["options"]["baseURL"] == f"{url}/v1"
        assert server.process.poll() is None


@pytest.mark.usefixtures("agents")
def test_a_server_that_it_starts_ends_with_the_agent() -> None:
    port = free_port()
    _, environment, said = told("claude", str(builtin.path()), "--port", str(port), "--threads", "1")
    assert environment["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{port}"
    assert "starting moeflux serve" in said and f"--threads 1 --port {port}" in said
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


@pytest.mark.usefixtures("agents")
def test_what_cannot_be_launched_is_a_line(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    refused(
        ["launch", "claude", "nowhere", "--port", port],
        "the server: expected it to start, found: moeflux serve: nowhere.*", capsys, "starting moeflux serve .*\n",
    )  # fmt: skip
    (tmp_path / "keys").write_text("a-long-secret\n")
    with serving("--no-disk", "--api-key-file", str(tmp_path / "keys")) as server:
        to, url = ["--port", str(server.port)], f"http://127.0.0.1:{server.port}"
        refused(["launch", "codex", *to], f"{url}: expected a key of this server; --api-key-file has them", capsys)
        to += ["--api-key-file", str(tmp_path / "keys")]
        said = f"{url}: expected a server of mine/own, found one of builtin; --port names another"
        refused(["launch", "codex", "mine/own", *to], said, capsys)
        assert told("codex", *to)[1]["MOEFLUX_API_KEY"] == "a-long-secret"
    with another_program(b"HTTP/1.0 200 OK\r\n\r\n{}") as port, another_program(b"220 mail\r\n") as mail:
        for each in (port, mail):
            said = f"http://127.0.0.1:{each}: expected a server of moeflux, found another program; --port names another"
            refused(["launch", "codex", "--port", str(each)], said, capsys)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    refused(["launch", "codex"], "codex: expected it to be installed, found none: npm install -g @openai/codex", capsys)
