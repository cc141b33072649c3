"""The server over the scheduler that there is: what it answers is what a session answers, and nothing is read twice."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

import moeflux
from moeflux import builtin
from moeflux.model import Model
from moeflux.serve.exchange import Pace
from moeflux.serve.scheduling import Scheduled
from moeflux.serving import Scheduler
from support.live_server import Live, live
from support.served import Gate, until

FRANCE = "What is the capital of France?"
QUESTIONS = [FRANCE, "What is 3 plus 4?", "Name two colors.", "Tell me a story about a fox."]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with moeflux.load(builtin.path(), threads=1, sessions=4) as model:
        yield model


@contextmanager
def served(model: Model, **options: Any) -> Iterator[tuple[Live, Scheduler]]:
    scheduler = Scheduler(model, **options)
    with scheduler:
        with live(model, pace=Pace(ping=0.1), scheduled=Scheduled(scheduler)) as server:
            yield server, scheduler
        assert scheduler.closed


@contextmanager
def ask(
    server: Live, body: dict[str, Any] | None, path: str = "/v1/chat/completions"
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
    with connection.getresponse() as answer:
        yield answer
    connection.close()


def messages(*said: str) -> list[Any]:
    return [
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * len(said), said, strict=False)
    ]


def test_answers_side_by_side_are_those_of_sessions(model: Model) -> None:
    found: dict[int, str] = {}
    with served(model) as (server, _):
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)

        def one(number: int) -> None:
            answer = client.chat.completions.create(
                model="builtin", messages=messages(QUESTIONS[number % 4]), max_tokens=30, temperature=0.7, seed=number,
                stream=True,
            )  # fmt: skip
            found[number] = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
    for number, text in sorted(found.items()):
        with model.chat() as talk:
            expected = talk.ask(QUESTIONS[number % 4], max_tokens=30, temperature=0.7, seed=number).text
        assert text == expected, number
    assert len(found) == 12


def test_many_clients_of_whom_some_leave_at_any_time(model: Model) -> None:
    """Who stays has the answer of a session, and when all are gone nothing of theirs goes on."""
    bodies = [
        {"messages": messages(question), "max_tokens": 24, "temperature": 0, "stream": True} for question in QUESTIONS
    ]
    expected = []
    for question in QUESTIONS:
        with model.chat() as talk:
            expected.append(talk.ask(question, max_tokens=24, temperature=0).text)
    found: dict[int, str] = {}

    def one(number: int) -> None:
        with ask(server, bodies[number % 4]) as answer:
            assert answer.status == 200
            if number % 3 == 0:
                answer.read(number * 31)  # from nothing to most of it
                return
            lines = [json.loads(line[6:]) for line in answer.read().split(b"\n") if line.startswith(b"data: {")]
            found[number] = "".join(line["choices"][0]["delta"].get("content", "") for line in lines)

    with served(model, waiting=64) as (server, scheduler):
        threads = [threading.Thread(target=one, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: scheduler.stats.ended == 64)
        assert scheduler.stats.failed == 0 and scheduler.stats.accepted == 64
    assert found == {number: expected[number % 4] for number in range(64) if number % 3}


def test_a_conversation_reads_nothing_twice(model: Model) -> None:
    with served(model) as (server, scheduler), openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:

        def turn(*said: str) -> tuple[str, int, int]:
            answer = client.chat.completions.create(model="m", messages=messages(*said), max_tokens=20, temperature=0)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens or 0
            return answer.choices[0].message.content or "", answer.usage.prompt_tokens, cached

        first, count, cached = turn(FRANCE)
        assert (first, cached) == ("The capital of France is Paris.", 0)
        _, _, cached = turn(FRANCE, first, "And of Spain?")
        assert cached >= count, "everything up to the end of the first answer but its last token"
        assert scheduler.stats.reused_tokens == cached
        with ask(server, None, "/metrics") as answer:
            text = answer.read().decode()
        assert f"moeflux_reused_tokens_total {float(cached)}" in text
        assert "moeflux_scheduler_accepted 2.0" in text


def test_json_is_json(model: Model) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "n",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["number"],
                "additionalProperties": False,
            },
        },
    }
    with served(model) as (server, _):
        body = {"messages": messages(QUESTIONS[1]), "response_format": form, "max_tokens": 40, "seed": 3}
        with ask(server, body) as answer:
            said = json.load(answer)
    assert 0 <= json.loads(said["choices"][0]["message"]["content"])["number"] <= 99


def test_a_form_comes_before_what_is_forbidden(model: Model) -> None:
    """A token that the client forbids may be the only one that its form allows."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    first = (model.tokenizer.encode(text)[0] for text in ('{"a": 1}', "{"))
    body = {"messages": messages(FRANCE), "response_format": form, "logit_bias": {str(token): -100 for token in first}}
    with served(model) as (server, _), ask(server, body) as answer:
        assert json.loads(json.load(answer)["choices"][0]["message"]["content"]) == {"a": 1}


def test_pings_say_how_much_is_read_and_who_leaves_ends_its_answer(model: Model) -> None:
    gate = Gate()
    with served(model, decoder=gate, rows=16) as (server, scheduler):
        body = {"messages": messages("Once upon a time. " * 30), "stream": True}
        with ask(server, body) as answer:
            assert answer.status == 200
            gate.wait()
            gate.let(2)
            read = sum(sum(rows.values()) for rows in gate.rows)
            assert read > 0
            while not answer.readline().startswith(b": prompt %d of " % read):
                pass
        gate.open()
        until(lambda: scheduler.stats.ended == 1)
        assert scheduler.stats.cancelled == 1


def test_a_full_line_is_a_429(model: Model) -> None:
    gate = Gate()
    with served(model, decoder=gate, running=1, waiting=1) as (server, scheduler):
        body = {"messages": messages(FRANCE), "max_tokens": 4}
        statuses: list[int] = []

        def one() -> None:
            with ask(server, body) as answer:
                statuses.append(answer.status)

        threads = [threading.Thread(target=one) for _ in range(2)]
        for count, thread in enumerate(threads, 1):
            thread.start()
            until(lambda count=count: scheduler.stats.accepted == count)
            gate.wait()
        with ask(server, body) as refused:
            assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        gate.open()
        for thread in threads:
            thread.join()
        assert statuses == [200, 200]
