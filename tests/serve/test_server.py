"""The server beneath its interfaces: who may ask, clients that leave, silence, overload, and its own paths."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from moeflux.errors import ArgumentError, Error
from moeflux.model import Model
from moeflux.serve.exchange import Pace
from moeflux.serve.fields import Limits
from moeflux.serve.guard import Rules, check_address
from support.live_server import Live, live

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"model": "m", "messages": FRANCE, "max_tokens": 4, "temperature": 0}
UNNAMED = {"messages": FRANCE, "max_tokens": 4}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"prompt": "Once upon a time there", "max_tokens": 4, "stream": True}),
    ("/v1/messages", {"messages": FRANCE, "max_tokens": 4, "stream": True}),
    ("/v1/responses", {"input": "Once upon a time", "max_output_tokens": 4, "stream": True}),
]


def ask(
    server: Live, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """(status, what the body says, headers)"""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
    answer = connection.getresponse()
    text = answer.read().decode()
    kind = answer.headers.get("content-type", "")
    connection.close()
    return answer.status, json.loads(text) if "json" in kind else text, dict(answer.headers)


def soon(condition: Any, seconds: float = 20.0) -> None:
    """Waits until it is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- Its own paths ----------------------------------------------------------------------------------------------


def test_its_own_paths(server: Live) -> None:
    assert ask(server, "GET", "/health")[:2] == (200, {"status": "ok"})
    status, told, _ = ask(server, "POST", "/tokenize", {"content": "Once <|im_end|> upon"})
    assert (status, told["count"]) == (200, len(told["tokens"]))
    assert ask(server, "POST", "/detokenize", {"tokens": told["tokens"]})[1] == {"content": "Once <|im_end|> upon"}
    _, chat, _ = ask(server, "POST", "/tokenize", {"messages": FRANCE})
    _, counted, _ = ask(server, "POST", "/v1/messages/count_tokens", {"messages": FRANCE})
    _, made, _ = ask(server, "POST", "/v1/chat/completions", CHAT)
    assert chat["count"] == counted["input_tokens"] == made["usage"]["prompt_tokens"]
    _, plan, _ = ask(server, "GET", "/plan")
    assert plan["plan"]["total_bytes"] > 0 and plan["memory"]["resident"] > 0
    _, models, _ = ask(server, "GET", "/v1/models")
    assert made["model"] == "m" and ask(server, "POST", "/v1/messages", UNNAMED)[1]["model"] == "builtin"
    assert models["data"][0]["context_window"] == models["models"][0]["max_model_len"] == 4096


def test_numbers(server: Live) -> None:
    ask(server, "POST", "/v1/chat/completions", CHAT)
    ask(server, "POST", "/v1/chat/completions", {})
    ask(server, "GET", "/some/secret/path")
    status, text, _ = ask(server, "GET", "/metrics")
    assert status == 200
    for line in (
        'moeflux_requests_total{path="/v1/chat/completions",status="200"}',
        'moeflux_requests_total{path="/v1/chat/completions",status="400"}',
        'moeflux_requests_total{path="other",status="404"}',
        "moeflux_first_token_seconds_bucket",
        "moeflux_reused_tokens_total",
        "moeflux_expert_hits_total",
        "moeflux_host_hits_total",
        "moeflux_copied_bytes_total",
        "moeflux_scheduler_waiting 0.0",
        'moeflux_memory_planned_bytes{purpose="scratch"}',
        'moeflux_expert_slots{memory="host"}',
        'moeflux_expert_slots_filled{memory="host"}',
        "moeflux_memory_resident_bytes",
    ):
        assert line in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/v2/models", None, 404, "path: expected"),
        ("GET", "/v1/chat/completions", None, 405, "expected another method"),
        ("POST", "/v1/chat/completions", b"{", 400, "body: "),
        ("POST", "/v1/chat/completions", b"[1]", 400, "body: expected a JSON object, found a list"),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400, "body: "),
        ("POST", "/v1/completions", {"prompt": [1 << 30]}, 400, "prompt: expected tokens 0 to 8191"),
        ("POST", "/v1/messages", {"messages": [], "max_tokens": 3}, 400, "messages: expected at least one"),
        ("POST", "/tokenize", {}, 400, "content: expected a value"),
        ("POST", "/detokenize", {"tokens": [-1]}, 400, "tokens: expected numbers from 0"),
        ("POST", "/v1/messages/count_tokens", {"messages": [1]}, 400, "messages[0]: expected an object"),
    ],
)
def test_errors(server: Live, method: str, path: str, body: Any, status: int, words: str) -> None:
    found, told, _ = ask(server, method, path, body)
    assert found == status and words in told["error"]["message"]
    assert ("type" in told) == path.startswith("/v1/messages")
    assert ask(server, "GET", "/health")[0] == 200


def test_a_failure_in_the_midst_is_told_and_nothing_else(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    def broken(prompt: str) -> str:
        raise Error("the disk: expected bytes, found none")

    server.scheduler.script = broken
    status, told, _ = ask(server, "POST", "/v1/chat/completions", CHAT)
    assert (status, told["error"]["type"]) == (500, "server_error")
    for path, body in STREAMS:
        status, text, _ = ask(server, "POST", path, body)
        assert status == 200 and "the disk: expected bytes, found none" in text
        assert "capital" not in caplog.text


def test_a_form_that_takes_too_much_is_the_fault_of_who_asked(server: Live) -> None:
    """It is found out while the answer is made."""
    schema = {"type": "string", "pattern": "((a{0,9999}){0,9999}){0,9999}"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    server.scheduler.script = lambda prompt: f'"{"a" * 40}"'
    status, told, _ = ask(server, "POST", "/v1/chat/completions", {**CHAT, "max_tokens": 50, "response_format": form})
    assert status == 400 and "expected one of which the next tokens can be told" in told["error"]["message"]


def test_whatever_comes_through_the_socket_is_no_fault_of_the_server(server: Live) -> None:
    """Requests with a few bytes changed, their lengths right. tests/fuzz has the same without a socket, for hours."""
    rng = random.Random(16)
    server.scheduler.script = lambda prompt: "Yes."
    words = [b"null", b"[]", b"{}", b"-1", b'"', b"\\ud800", b"\xff", b"1e999", b"true", b'{"type":"text"}', b","]
    for number in range(160):
        path, body = STREAMS[number % 4]
        whole = {**body, "tools": [{"type": "function", "name": "f", "function": {"name": "f"}, "input_schema": {}}]}
        data = json.dumps(body if number % 8 < 4 else whole).encode()
        for _ in range(rng.randrange(1, 4)):
            begin = rng.randrange(len(data))
            data = data[:begin] + rng.choice(words) + data[begin + rng.randrange(6) :]
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
        connection.request("POST", path, data)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert answer.status in (200, 400), (data, text)
        assert "the server failed" not in text, data
    assert ask(server, "GET", "/health")[0] == 200


def test_bytes_that_are_no_request_are_no_fault_either(server: Live) -> None:
    rng, url = random.Random(5), urlsplit(server.url)
    lines = [
        b"POST /v1/messages HTTP/1.1\r\n",
        b"Host: localhost\r\n",
        b"Content-Length: 999999999\r\n",
        b"\r\n",
        b"\0",
    ]
    for _ in range(40):
        with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
            connection.sendall(b"".join(rng.choices(lines, k=rng.randrange(1, 8))))
            connection.shutdown(socket.SHUT_WR)
            text = b""
            while part := connection.recv(65536):
                text += part
            assert b" 500 " not in text
    assert ask(server, "GET", "/health")[0] == 200


# ---- Streams, and clients that leave ----------------------------------------------------------------------------


def open_stream(server: Live, path: str, body: dict[str, Any]) -> socket.socket:
    url = urlsplit(server.url)
    connection = socket.create_connection((url.hostname, url.port), timeout=30)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_while_the_prompt_is_read_the_client_hears_something(server: Live, path: str, body: dict[str, Any]) -> None:
    server.scheduler.hold.clear()
    with open_stream(server, path, body) as connection:
        text = ""
        while text.count("ping") + text.count(": prompt") < 3:
            text += connection.recv(65536).decode()
        assert text.startswith("HTTP/1.1 200 OK") and "text/event-stream" in text
        handle = server.scheduler.seen[-1][0]
        assert 0 < handle.prompt_read < len(handle.prompt)
        told = f'"read":{handle.prompt_read},"of"' if path == "/v1/messages" else f": prompt {handle.prompt_read} of "
        assert told in text
        server.scheduler.hold.set()
        while not text.endswith("0\r\n\r\n"):
            text += connection.recv(65536).decode()
    assert handle.finish == "length"


@pytest.mark.parametrize(("path", "body"), [*STREAMS, ("/v1/chat/completions", CHAT)])
def test_a_client_that_leaves_during_the_prompt_ends_its_answer(server: Live, path: str, body: dict[str, Any]) -> None:
    server.scheduler.hold.clear()
    connection = open_stream(server, path, body)
    soon(lambda: server.scheduler.seen)
    handle = server.scheduler.seen[-1][0]
    soon(lambda: handle.prompt_read > 0)
    assert not handle.cancelled.is_set()
    connection.close()
    soon(lambda: handle.finish == "cancelled")


def test_a_client_that_leaves_in_the_midst_ends_its_answer(server: Live) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 2000, "stream": True}
    connection = open_stream(server, "/v1/chat/completions", {**body, "ignore_eos": True, "n": 2})
    text = b""
    while text.count(b'"content"') < 5:
        text += connection.recv(65536)
    connection.close()
    for handle, _ in server.scheduler.seen:
        soon(lambda handle=handle: handle.finish == "cancelled")
    assert ask(server, "POST", "/v1/chat/completions", CHAT)[0] == 200


def test_clients_that_leave_at_any_time_leave_nothing_behind(server: Live) -> None:
    url = urlsplit(server.url)
    for number in range(56):
        path, body = STREAMS[number % 4]
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
        whole = head.encode() + data
        with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
            connection.sendall(whole[: len(whole) * (number % 8) // 7])
            if number % 8 == 7 and number > 20:
                connection.recv(number * 20)
    assert ask(server, "POST", "/v1/chat/completions", CHAT)[0] == 200
    for handle, _ in server.scheduler.seen:
        soon(lambda handle=handle: handle.finish is not None)


# ---- Limits -----------------------------------------------------------------------------------------------------


def test_limits_of_bodies_and_of_patience(model: Model) -> None:
    with live(model, limits=Limits(body=2000, answers=2), pace=Pace(body=0.3)) as server:
        status, told, _ = ask(server, "POST", "/v1/chat/completions", {**CHAT, "user": "x" * 3000})
        assert (status, told["error"]["message"]) == (413, "body: expected at most 2000 bytes, found more")
        assert ask(server, "POST", "/v1/chat/completions", {**CHAT, "n": 3})[0] == 400
        url = urlsplit(server.url)
        with socket.create_connection((url.hostname, url.port), timeout=30) as slow:
            slow.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: 9\r\n\r\n{{".encode())
            assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_overload_is_said_with_when_to_come_again(model: Model) -> None:
    with live(model, waiting=2) as server:
        server.scheduler.hold.clear()
        waiting = [open_stream(server, "/v1/chat/completions", {**CHAT, "stream": True})]
        soon(lambda: server.scheduler.seen and server.scheduler.seen[0][0].prompt_read)
        waiting += [open_stream(server, "/v1/chat/completions", {**CHAT, "stream": True}) for _ in range(2)]
        soon(lambda: len(server.scheduler.seen) == 3)
        status, told, headers = ask(server, "POST", "/v1/chat/completions", CHAT)
        assert (status, told["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "3")
        status, told, headers = ask(server, "POST", "/v1/messages", {"messages": FRANCE, "max_tokens": 1})
        assert (status, told["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "3")
        server.scheduler.hold.set()
        for connection in waiting:
            text = b""
            while b"[DONE]" not in text:
                text += connection.recv(65536)
            connection.close()


def test_who_was_accepted_is_answered_when_the_server_ends(model: Model) -> None:
    with live(model) as server:
        server.scheduler.hold.clear()
        connection = open_stream(server, "/v1/chat/completions", {**CHAT, "stream": True})
        soon(lambda: server.scheduler.seen)
        threading.Timer(0.3, server.scheduler.hold.set).start()
    text = b""
    while part := connection.recv(65536):
        text += part
    connection.close()
    assert b"[DONE]" in text and server.scheduler.closed


# ---- Who may ask ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(model: Model) -> Iterator[Live]:
    hosts = ("127.0.0.1", "localhost", "box.example")
    with live(model, rules=Rules(hosts, ("https://chat.example",), ("first key", "other key"))) as server:
        yield server


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer first key"}, 200),
        ({"authorization": "bearer other key"}, 200),
        ({"X-Api-Key": "other key"}, 200),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic first key"}, 401),
        ({"X-Api-Key": "first key", "Host": "box.example:8080"}, 200),
        ({"X-Api-Key": "first key", "Host": "LOCALHOST"}, 200),
        ({"X-Api-Key": "first key", "Host": "evil.example"}, 403),
        ({"X-Api-Key": "first key", "Host": "127.0.0.1.evil.example"}, 403),
        ({"X-Api-Key": "first key", "Host": "[::1"}, 403),
        ({"X-Api-Key": "first key", "Origin": "https://evil.example"}, 403),
        ({"X-Api-Key": "first key", "Origin": "null"}, 403),
        ({"X-Api-Key": "first key", "Origin": "https://chat.example"}, 200),
        ({"X-Api-Key": "first key", "Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"X-Api-Key": "first key", "Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
    ],
)
def test_who_may_ask(guarded: Live, headers: dict[str, str], status: int) -> None:
    found, told, given = ask(guarded, "GET", "/v1/models", headers=headers)
    assert found == status
    assert ("access-control-allow-origin" in given) == (headers.get("Origin") == "https://chat.example")
    if status != 200:
        assert "first key" not in json.dumps(told) and ("www-authenticate" in given) == (status == 401)


def test_pages_that_are_named_may_ask_first(guarded: Live) -> None:
    origin = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    status, _, headers = ask(guarded, "OPTIONS", "/v1/chat/completions", headers=origin)
    assert status == 204 and "x-api-key" in headers["access-control-allow-headers"]
    assert ask(guarded, "OPTIONS", "/v1/chat/completions", headers={"Origin": "https://evil.example"})[0] == 403


def test_keys_tell_who_asks(guarded: Live) -> None:
    for key in ("first key", "other key", "first key"):
        ask(guarded, "POST", "/v1/chat/completions", CHAT, {"X-Api-Key": key})
    one, other, again = (fields["tenant"] for _, fields in guarded.scheduler.seen[-3:])
    assert one == again != other and "key" not in one
    assert ask(guarded, "GET", "/health")[0] == 200


def test_an_address_that_others_reach_needs_a_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        check_address(host, (), insecure=False)
    check_address("0.0.0.0", ("key",), insecure=False)
    check_address("0.0.0.0", (), insecure=True)
    with pytest.raises(ArgumentError, match="host: expected a loopback address, or a key"):
        check_address("0.0.0.0", (), insecure=False)
