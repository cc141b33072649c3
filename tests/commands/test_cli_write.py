"""`moeflux run` and `moeflux chat` as people and pipes use them: what goes where, and every way to do it wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import moeflux
from moeflux import builtin
from moeflux.cli import main
from moeflux.cli.terminal_chat import HELP, TerminalChat
from moeflux.machine.sandbox import RENDERING
from moeflux.text.template import RENDERER

MOEFLUX = [sys.executable, "-m", "moeflux"]
STORY = "Once upon a time, there was a little fox who"
FRANCE = "What is the capital of France?"


def called(*argv: str, given: str | bytes = "", **options: object) -> subprocess.CompletedProcess[bytes]:
    data = given.encode() if isinstance(given, str) else given
    return subprocess.run([*MOEFLUX, *argv], input=data, capture_output=True, check=False, timeout=900, **options)


def refused(run: subprocess.CompletedProcess[bytes], words: str) -> None:
    """One line, and status 2."""
    one_line(run.returncode, run.stderr.decode(), words)


def one_line(status: int, error: str, words: str) -> None:
    assert status == 2, error
    assert error.count("\n") == 1 and error.startswith("moeflux "), error
    assert re.search(words, error), error


# ---- run --------------------------------------------------------------------------------------------------------


def test_the_answer_and_nothing_else_goes_to_stdout() -> None:
    for run in (
        called("run", "-p", FRANCE, "--temperature", "0", "--stats"),
        called("run", str(builtin.path()), "--temperature", "0", "--stats", given=FRANCE + "\n"),
        called("run", "-f", "-", "--temperature", "0", "--stats", given=FRANCE),
    ):
        assert run.stdout == b"The capital of France is Paris.\n"
        assert run.returncode == 0
        assert re.fullmatch(r"prompt 15 tokens in .*; answer 8 tokens in .*; experts: .*\n", run.stderr.decode())


def test_raw_goes_on_with_the_text(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(STORY + "\n")
    run = called("run", "--raw", "-f", str(tmp_path / "prompt"), "--temperature", "0", "-n", "10")
    assert run.stdout == b" lived in a village by the sea. One day\n"
    assert run.stderr.decode() == "moeflux run: stopped after 10 tokens: --max-tokens allows no more\n"
    stopped = called("run", "--raw", "-p", STORY, "--temperature", "0", "--stop", " by the", "--stop", "zz")
    assert (stopped.stdout, stopped.stderr) == (b" lived in a village\n", b"")


def test_a_seed_is_a_text(capfd: pytest.CaptureFixture[str]) -> None:
    texts = []
    for more in ([], ["--threads", "1", "--expert-slots", "40"], ["--seed", "6"]):
        assert main(["run", "--raw", "-p", STORY, "-n", "20", "--temperature", "1", "--seed", "5", *more]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_json_for_machines() -> None:
    run = called("run", "-p", FRANCE, "--temperature", "0", "--json", "--logprobs", "2", "--logit-bias", "5=-inf")
    *tokens, whole = (json.loads(line) for line in run.stdout.splitlines())
    assert whole["text"] == "".join(token["text"] for token in tokens) == "The capital of France is Paris."
    assert whole["tokens"] == [token["token"] for token in tokens]
    assert (whole["finish"], whole["thoughts"], whole["lossy"]) == ("end", "", [])
    assert whole["stats"]["prompt_tokens"] == 15 and whole["sampling"]["logit_bias"] == {"5": None}
    assert all(len(token["top"]) == 2 and token["top"][0]["logprob"] <= 0 for token in tokens)
    assert isinstance(whole["sampling"]["seed"], int)
    rounded = called("run", "-p", FRANCE, "--temperature", "0", "--json", "--kv-dtype", "bf16")
    assert json.loads(rounded.stdout.splitlines()[-1])["lossy"] == ["keeps keys and values in bf16, not f32"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-p", ""], "prompt: expected some text, found none"),
        (["-p", " \n "], "prompt: expected some text, found none"),
        (["-f", "/nowhere"], "/nowhere: cannot be opened: No such file"),
        (["-f", "/"], "/: expected a regular file, found a directory"),
        (
            ["/nowhere", "-p", "x"],
            "/nowhere: expected a folder, .* found nothing of that name$",
        ),
        (["a3b", "-p", "x"], r"a3b: .*, found only a preset, which has no weights: .*moeflux bench.* take it$"),
        (["What is it?"], r"What is it\?: expected a folder, .* found nothing of that name; give a prompt with -p"),
        (["why? " * 200], "why.*; give a prompt with -p"),
        (["-p", "x", "--temperature", "-1"], "temperature: expected at least 0"),
        (["-p", "x", "--top-p", "2"], "top_p: expected more than 0 to 1, found 2"),
        (["-p", "x", "--stop", ""], "stop: expected"),
        (["-p", "x", "--logit-bias", "9999=1"], "logit_bias: expected tokens 0 to 8191, found 9999"),
        (["-p", "x", "--json", "--logprobs", "5000"], "logprobs: expected 0 to 1024"),
        (["-p", "x " * 5000], "prompt: expected at most 4096 tokens"),
        (["-p", "x", "--raw", "--system", "y"], "--system: expected"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    one_line(main(["run", *argv]), capsys.readouterr().err, words)


@pytest.mark.parametrize(
    "argv", [["--nonsense"], ["-p", "x", "-f", "y"], ["-p", "x", "--seed", "one"], ["-p", "x", "--logit-bias", "3"]]
)
def test_wrong_flags(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    one_line(main(["run", *argv]), capsys.readouterr().err, "expected|not allowed")


def test_the_model_is_there_before_a_prompt_is_asked_for() -> None:
    """A wrong call fails before anything is read from stdin."""
    read, write = os.pipe()
    run = subprocess.run([*MOEFLUX, "run", "/nowhere"], stdin=read, capture_output=True, check=False, timeout=900)
    os.close(write)
    os.close(read)
    refused(run, "/nowhere: expected a folder")
    opened = subprocess.run(
        [*MOEFLUX, "run", "--context", "9999999"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    refused(opened, "context: expected 1 to")


def test_input_that_is_no_text() -> None:
    refused(called("run"), "expected some text")
    refused(called("run", given=b"\xff"), "stdin: expected UTF-8, found byte 0")
    refused(subprocess.run([*MOEFLUX, "run", b"-p", b"\xff"], capture_output=True, check=False), "expected Unicode")


def test_any_locale_writes_utf8(tmp_path: Path) -> None:
    """The fox is forced, byte by byte, by a template that ends behind it."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    model = moeflux.load(builtin.path())
    id = max(id for id in range(256, 8000) if not model.tokenizer.decode([id]).isascii())
    text = model.tokenizer.decode([id])
    bias = f"{id}=1000"
    run = called("run", "--raw", "-p", STORY, "-n", "1", "--logit-bias", bias, env=environment)
    assert run.stdout.decode("utf-8") == text + "\n"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Templates have less time than users give them."""
    RENDERER.end()
    monkeypatch.setattr(RENDERER, "limits", replace(RENDERING, seconds=0.5))
    yield
    RENDERER.end()


@pytest.mark.usefixtures("hurried")
def test_a_template_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(builtin.path(), tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    for words in (["run", str(tmp_path / "model"), "-p", "x"], ["chat", str(tmp_path / "model")]):
        one_line(main(words), capsys.readouterr().err, "chat_template.jinja: expected to be rendered with")
    template.write_text("{{ raise_exception('I only know silence') }}")
    words = ["run", str(tmp_path / "model"), "-p", "x"]
    one_line(main(words), capsys.readouterr().err, "refuses this conversation: I only know silence")


def test_a_closed_pipe_is_silent() -> None:
    with subprocess.Popen(
        [*MOEFLUX, "run", "--raw", "-p", STORY, "-n", "400"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.read(5)
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_a_line() -> None:
    with open("/dev/full", "wb") as full:
        run = subprocess.run([*MOEFLUX, "run", "-p", "x"], stdout=full, stderr=subprocess.PIPE, check=False)
    refused(run, "No space left on device")


def test_ctrl_c_stops_an_answer() -> None:
    with subprocess.Popen(
        [*MOEFLUX, "run", "--raw", "-p", STORY, "-n", "3000", "--stats", "--logit-bias", "8178=-inf"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        begun = run.stdout.read(5)
        run.send_signal(signal.SIGINT)
        rest, error = run.stdout.read(), run.stderr.read().decode()
    assert run.returncode == 130
    assert len(begun) == 5 and rest.endswith(b"\n")
    assert error.startswith("prompt 11 tokens") and error.count("\n") == 1


# ---- chat through a pipe ----------------------------------------------------------------------------------------


def test_lines_are_questions(tmp_path: Path) -> None:
    file = tmp_path / "my talk"
    run = called("chat", "--temperature", "0", given=f"What is 3 plus 4?\n\n{FRANCE}\n/save '{file}'\n")
    assert run.stdout.decode() == "3 plus 4 is 7.\nThe capital of France is Paris.\n"
    assert (run.returncode, run.stderr.decode()) == (0, f"kept in {file}\n")
    again = called("chat", "--temperature", "0", "--load", f"'{file}'", given="/show\n/retry\n")
    assert again.stdout.decode() == (
        f"user: What is 3 plus 4?\nassistant: 3 plus 4 is 7.\nuser: {FRANCE}\n"
        "assistant: The capital of France is Paris.\nThe capital of France is Paris.\n"
    )
    assert again.returncode == 0 and "2 questions" in again.stderr.decode()


def test_commands_that_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("no conversation")
    for line, words in (
        ("/nonsense", "/nonsense: expected a command that /help lists"),
        ("/save", "/save: expected the name of one file"),
        ("/save x", "expected a conversation, found nothing said yet"),
        (f"{FRANCE}\n/save /nowhere/x", "/nowhere/x: No such file or directory"),
        ("/load /nowhere/x", "/nowhere/x: cannot be opened: No such file or directory"),
        (f"/load {tmp_path}/text", "text: "),
        ("/undo", "undo: expected a question"),
        ("/set temperature hot", "temperature: expected a number or default, found 'hot'"),
        ("/set heat 3", "/set: expected temperature"),
        ("/set top_p 3", "top_p: expected more than 0 to 1"),
        ("/thinking maybe", "/thinking: expected on or off"),
        ("/effort much", "/effort: expected low, medium, high, found 'much'"),
        ("/effort low", "reasoning_effort: expected a template that has it"),
        ("x " * 5000, "prompt: expected at most 4096 tokens"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(line + "\n"))
        one_line(main(["chat", "--temperature", "0"]), capsys.readouterr().err, words)
    refused(called("chat", given=b"\xff\n"), "expected UTF-8")
    refused(called("chat", "--load", str(tmp_path / "text"), given="x\n"), "text: ")


def test_saving_on_a_full_disk(tmp_path: Path) -> None:
    """A limit on the length of files serves as a full disk: the system refuses in the middle of a write."""

    limited = "import resource, sys, moeflux.cli; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    chat = "sys.exit(moeflux.cli.main(['chat', '--temperature', '0']))"
    given = f"{FRANCE}\n/save {tmp_path}/talk\n".encode()
    run = subprocess.run([sys.executable, "-c", f"{limited}; {chat}"], input=given, capture_output=True, check=False)
    refused(run, "talk: File too large; nothing was written")
    assert list(tmp_path.iterdir()) == []


# ---- chat in a terminal -----------------------------------------------------------------------------------------


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.execve(argv[0], argv, environment)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def wait_for(self, pattern: str, seconds: float = 600) -> str:
        """Reads until it matches; returns what came until then."""
        until = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < until, f"{pattern!r} did not come: {self.seen!r}"
            if select.select([self.file], [], [], 1)[0]:
                try:
                    data = os.read(self.file, 65536).decode(errors="replace")
                except OSError:  # Linux says so when the program has ended
                    data = ""
                if not data:
                    match = re.search(pattern, self.seen)
                    assert match, f"{pattern!r} did not come before the end: {self.seen!r}"
                    break
                # Colours, and what line editing does with the cursor.
                self.seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data).replace("\r", "")
        until_here, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return until_here

    def end(self) -> int:
        """Its exit status."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.file)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)


PROMPT = r"(?:^|\n)> $"


@pytest.fixture
def open_chat(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []
    environment = {**os.environ, "MOEFLUX_CACHE": str(tmp_path / "cache"), "TERM": "xterm", "COLUMNS": "200"}

    def start(*argv: str) -> Terminal:
        opened.append(Terminal([*MOEFLUX, "chat", "--temperature", "0", *argv], environment))
        opened[-1].wait_for(PROMPT)
        return opened[-1]

    yield start
    for terminal in opened:
        if terminal.pid:
            os.kill(terminal.pid, signal.SIGKILL)
            terminal.end()


def test_five_turns_saved_quit_and_resumed(open_chat: Callable[..., Terminal], tmp_path: Path) -> None:
    chat = open_chat("--stats")
    for question, answer in (
        ("What is 3 plus 4?", r"3 plus 4 is 7\."),
        (FRANCE, r"The capital of France is Paris\."),
        ("What is 5 plus 6?", r"5 plus 6 is 11\."),
        ("What is the opposite of hot?", r"[Cc]old"),
        ("What is 2 plus 2?", r"2 plus 2 is 4\."),
    ):
        chat.type(question + "\n")
        chat.wait_for(answer)
        chat.wait_for(r"were there already|answer \d+ tokens")
        chat.wait_for(PROMPT)
    chat.type(f"/save {tmp_path}/talk\n")
    chat.wait_for("kept in")
    chat.wait_for(PROMPT)
    chat.type("\x04")
    assert chat.end() == 0
    resumed = open_chat("--load", f"{tmp_path}/talk")
    resumed.type("/show\n")
    assert resumed.wait_for(PROMPT).count("user: ") == 5
    resumed.type("\x1b[A\x1b[A")  # the line before the last, of the first program
    resumed.wait_for(rf"ave {tmp_path}/talk")  # drawn over what stood there
    resumed.type("\x15/quit\n")
    assert resumed.end() == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(open_chat: Callable[..., Terminal]) -> None:
    chat = open_chat("--logit-bias", "8178=-inf", "--logit-bias", "8176=-inf")
    chat.type("Tell me a story about a rabbit named Daisy.\n")
    chat.wait_for("Daisy was a")
    chat.type("\x03")
    chat.wait_for(r"\(stopped\)")
    chat.wait_for(PROMPT)
    chat.type("half a line")
    chat.wait_for("half a line")
    time.sleep(1)  # Python's input() misses a signal between drawing a line and waiting for the next key
    chat.type("\x03")
    chat.wait_for(r"\(Ctrl-D ends\)")
    chat.wait_for(PROMPT)
    chat.type("/show\n")
    said = chat.wait_for(PROMPT)
    assert "user: Tell me a story" in said and "assistant: Daisy was a" in said and "half a line" not in said
    chat.type("/clear\n")
    chat.wait_for(PROMPT)
    chat.type("/show\n")
    assert "user:" not in chat.wait_for(PROMPT)
    chat.type("\x04")
    assert chat.end() == 0


def test_messages_of_several_lines(open_chat: Callable[..., Terminal]) -> None:
    chat = open_chat("-n", "2")
    for typed in ('"""one\ntwo\n\nthree"""\n', "one\\\ntwo\\\n\\\nthree\n"):
        chat.type("/clear\n")
        chat.wait_for(PROMPT)
        chat.type(typed)
        chat.wait_for(r"stopped: max_tokens")
        chat.wait_for(PROMPT)
        chat.type("/show\n")
        assert "user: one\ntwo\n\nthree\n" in chat.wait_for(PROMPT)


def test_help_lists_every_command() -> None:
    talk = moeflux.load(builtin.path()).chat()
    chat = TerminalChat(talk, {})
    listed = set(re.findall(r"^/(\w+)", HELP, re.MULTILINE))
    assert set(chat.commands) - listed == {"exit"} and listed <= set(chat.commands)


def test_settings(capsys: pytest.CaptureFixture[str]) -> None:
    chat = TerminalChat(moeflux.load(builtin.path()).chat(), {"temperature": 0.0})
    chat._take("/set")
    assert re.search(r"temperature +0\.0\n.*top_p +0\.9\n", capsys.readouterr().out, re.DOTALL)
    chat._take("/set temperature default")
    chat._take("/set max_tokens 7")
    chat._take("/set seed 3")
    assert chat.settings == {"max_tokens": 7, "seed": 3}
    chat._take("/system Be kind.")
    chat._take("//hello")
    assert [message["content"] for message in chat.talk.messages][:2] == ["Be kind.", "/hello"]
    first = chat.last
    chat._take("/retry")
    assert first is not None and chat.last is not None
    assert (first.generation.sampling.seed, chat.last.generation.sampling.seed) == (3, 4)
    capsys.readouterr()
    chat._take("/stats")
    assert "answer" in capsys.readouterr().out
