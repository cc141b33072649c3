"""An agent at the size of real ones: instructions of 8,000 tokens, twenty turns, a thousand tokens of each tool.
Another agent shares the instructions, an earlier message is edited, and the server restarts. Nothing but new text is
read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import moeflux
from moeflux import Sampling
from moeflux.conversion.convert import ConvertFormat
from moeflux.conversion.synth import synth
from moeflux.serving import Request, Scheduler
from support.engine import Folder, load_faulty
from support.served import Alone, text

INSTRUCTIONS, TOOL, ANSWER, TURNS = 8000, 1000, 6, 20


@pytest.fixture(scope="module")
def model(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> moeflux.Model:
    """A tiny hybrid one with room for all of that: a recurrent layer, and attention with one narrow head."""
    small = load_faulty(folder("qwen3_5_moe")).variant
    *_, recurrent, attending = small.layers
    head = dataclasses.replace(attending.mixer, heads=1, kv_heads=1, head_dim=32)
    layers = (recurrent, dataclasses.replace(attending, mixer=head))
    path = tmp_path_factory.mktemp("agents") / "long"
    synth(path, dataclasses.replace(small, layers=layers, max_context=1 << 15), format=ConvertFormat.asked(4, 32))
    return load_faulty(path, chunk=256)


class Agent:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.said = text(INSTRUCTIONS, seed=5)
        self.borders = [INSTRUCTIONS]

    def turn(self, scheduler: Scheduler) -> tuple[Request, list[int], int]:
        """The request of the next turn, its answer, and how many tokens of the prompt were evaluated."""
        self.said = self.said + text(TOOL, seed=100 * self.seed + len(self.borders))
        self.borders.append(len(self.said))
        request = self.request(self.said)
        answer = scheduler.submit(request).wait()
        self.said = self.said + answer.tokens
        return request, answer.tokens, len(answer.prompt) - answer.stats.reused_tokens

    def request(self, said: list[int]) -> Request:
        sampling = Sampling(1.0, seed=self.seed)
        return Request(said, max_tokens=ANSWER, ignore_end=True, sampling=sampling, borders=list(self.borders))


def test_an_agent_reads_nothing_but_new_text(model: moeflux.Model, tmp_path: Path) -> None:
    alone = Alone(model)
    agent, other = Agent(1), Agent(2)
    with Scheduler(model, running=2, disk=tmp_path / "states") as scheduler:
        assert agent.turn(scheduler)[2] == INSTRUCTIONS + TOOL
        for _ in range(1, TURNS - 1):
            assert agent.turn(scheduler)[2] == TOOL + 1, "the last token of an answer is not evaluated before"
        assert other.turn(scheduler)[2] == TOOL, "the instructions are there"
        assert other.turn(scheduler)[2] == TOOL + 1
        # What the tool said first becomes another: from there on everything is new.
        begin = other.borders[0]
        edited = other.said[:begin] + text(TOOL, seed=999) + other.said[begin + TOOL :]
        request = other.request(edited)
        answer = scheduler.submit(request).wait()
        evaluated = len(edited) - answer.stats.reused_tokens
        assert len(edited) - begin <= evaluated <= len(edited) - begin + 1
        assert (answer.tokens, answer.finish) == alone(request)
    with Scheduler(model, running=2, disk=tmp_path / "states") as scheduler:
        request, tokens, evaluated = agent.turn(scheduler)
        assert evaluated == TOOL + 1, "what was not edited survives a restart"
        assert (tokens, "length") == alone(request)
        assert other.turn(scheduler)[2] == TOOL + 1
        assert Agent(3).turn(scheduler)[2] == TOOL, "and so do the instructions"
