"""A server that answers as huggingface.co does, for the real library to talk to."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from moeflux import builtin

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a folder."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Path] = {}
        self.breaks: dict[str, int] = {}  # file: bytes after which its connection is lost
        self.halts: dict[str, threading.Event] = {}  # file: set when its second half may follow
        self.fetched: list[tuple[str, str]] = []  # file, range asked for
        self.architectures: dict[str, str] = {}  # repository: what its GGUF files are of


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            files = self._files("/".join(parts[2:4]))
            tree = [{"type": "file", "oid": "0" * 40, "path": name, "size": size} for name, size in files]
            self._answer(200, json.dumps(tree).encode())
        elif parts[:2] == ["api", "models"]:
            self._info("/".join(parts[2:4]))
        elif parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._answer(404, b"{}")

    def _info(self, name: str) -> None:
        folder = self.server.repositories.get(name)
        if folder is None:
            self._answer(404 if name != "private/model" else 403, b"{}", {
                "X-Error-Code": "RepoNotFound" if name != "private/model" else "GatedRepo"
            })  # fmt: skip
            return
        siblings = [{"rfilename": file, "size": size} for file, size in self._files(name)]
        info: dict[str, object] = {
            "id": name,
            "modelId": name,
            "sha": COMMIT,
            "siblings": siblings,
            "private": False,
            "tags": [],
        }
        if name in self.server.architectures:
            info["gguf"] = {"total": 1, "architecture": self.server.architectures[name]}
        self._answer(200, json.dumps(info).encode())

    def _files(self, name: str) -> list[tuple[str, int]]:
        folder = self.server.repositories[name]
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        return [(str(file.relative_to(folder)), file.stat().st_size) for file in files]

    def _file(self, name: str, file: str) -> None:
        if name not in self.server.repositories:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        data = (self.server.repositories[name] / file).read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range", "")
        if self.command == "HEAD":
            self._answer(200, data, headers)
            return
        self.server.fetched.append((file, asked))
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._answer(206 if asked else 200, data[start:], headers, self.server.breaks.pop(file, None))

    def _answer(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, limit: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            halt = self.server.halts.pop(self.path.rpartition("/")[2], None)
            if halt is not None:
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                halt.wait(60)
                data = data[len(data) // 2 :]
            self.wfile.write(data[:limit])
        if limit is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Hub]:
    """One that has the built-in model as test/model."""
    server = Hub()
    server.repositories["test/model"] = builtin.path()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def called(hub: Hub | None, home: Path, *argv: str) -> subprocess.CompletedProcess[bytes]:
    return program_of(hub, home, "-m", "moeflux", "run", *argv)


IN_TURN = """
import json, sys
from moeflux.cli import main
for words in json.loads(sys.argv[1]):
    status = main(words)
    for stream in (sys.stdout, sys.stderr):
        print("\\0", status, "\\0", sep="", end="", file=stream, flush=True)
"""


def called_in_turn(hub: Hub | None, home: Path, *calls: Sequence[str]) -> list[subprocess.CompletedProcess[bytes]]:
    """Commands of one process, one after another."""
    run = program_of(hub, home, "-c", IN_TURN, json.dumps(calls))
    assert run.returncode == 0, run.stderr.decode()
    said, errors = (stream.split(b"\0")[:-1] for stream in (run.stdout, run.stderr))
    assert len(said) == len(errors) == 2 * len(calls)
    return [
        subprocess.CompletedProcess(words, int(said[2 * i + 1]), said[2 * i], errors[2 * i])
        for i, words in enumerate(calls)
    ]


def program_of(hub: Hub | None, home: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    endpoint = f"http://127.0.0.1:{hub.server_port}" if hub is not None else "http://127.0.0.1:9"
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=900)


def refused(run: subprocess.CompletedProcess[bytes], words: str) -> None:
    error = run.stderr.decode()
    assert run.returncode == 2, error
    assert words in error.splitlines()[-1] and "Traceback" not in error, error
