"""What the logger `moeflux` is told: loads, plans, fall-backs, closing; and that nobody hears of it unasked."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import moeflux
from moeflux import builtin
from moeflux.runtime import plan as planning
from moeflux.runtime.look_ahead import LookAheadNotes
from moeflux.serving import Request, Scheduler
from support.engine import load_faulty


def said(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    assert all(record.name == "moeflux" for record in caplog.records)
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_a_load_its_plan_and_its_end_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "moeflux"):
        with moeflux.load(threads=1, context=512, memory=None) as model:
            model.session().complete("Once", max_tokens=2, temperature=0)
        model.close()
    plan, loaded, closed = said(caplog)
    name = model.variant.name
    assert plan.startswith(f"{name}: plan: ") and " of no limit, " in plan and plan.endswith("1 x 512 tokens")
    assert loaded.startswith(f"{builtin.path()}: loaded in ") and "cpu" in loaded
    assert closed == f"{builtin.path()}: closed"
    whole, answer = said(caplog, logging.DEBUG)
    assert str(model.plan) in whole and answer.startswith("answer: length: prompt ")


def test_what_is_less_than_hoped_for_is_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning._core, "supports_direct", lambda file: False)
    with caplog.at_level(logging.INFO, "moeflux"):
        name = moeflux.load(threads=1, expert_slots=64).variant.name
    (line,) = [line for line in said(caplog) if "fall back" in line]
    assert line == f"{name}: reads fall back to the page cache: this file system has no direct reads"


@dataclass
class Found:
    """A core session whose last call has left this finding."""

    look_ahead_pays: bool | None
    drafts_pay: bool | None = None

    @property
    def last(self) -> Found:
        return self


def test_whether_look_ahead_pays_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    notes = LookAheadNotes("m")
    notes.note(Found(True))  # nobody listens yet
    with caplog.at_level(logging.INFO, "moeflux"):
        for pays in (None, True, True, None, True, False, False, True):
            notes.note(Found(pays))
    on, off = "m: look-ahead is on: steps are faster with it", "m: look-ahead is off: steps are no faster with it"
    assert said(caplog) == [on, off, on]
    with caplog.at_level(logging.INFO, "moeflux"):
        notes.note(Found(True, drafts_pay=False))
    assert said(caplog)[3:] == ["m: speculation is off: steps are no faster with it"]


def test_every_call_may_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(LookAheadNotes, "note", lambda self, core: asked.append(core.last.look_ahead_pays))
    session = moeflux.load(threads=1, look_ahead="off").session()
    session.step(session.prefill([1, 2, 3]).argmax())
    assert asked == [None, None]


def test_so_may_every_step_of_a_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(LookAheadNotes, "note_stats", lambda self, last: asked.append(last.tokens))
    with Scheduler(moeflux.load(threads=1, look_ahead="off")) as scheduler:
        scheduler.submit(Request([1, 2, 3], max_tokens=3, ignore_end=True)).wait()
    assert asked in ([3, 1, 1], [3, 1])  # of steps that were made ahead and come together, the first


def test_an_answer_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    plan = planning._core.FaultPlan("error", 100)
    faulty = load_faulty(builtin.path(), fault=plan, expert_slots=64, look_ahead="off")
    with pytest.raises(moeflux.IoError):
        faulty.session().complete("Once upon a time", max_tokens=40)
    (line,) = said(caplog, logging.WARNING)
    assert line.startswith("answer: failed after ")


def test_nobody_hears_of_it_unasked(tmp_path: Path) -> None:
    program = (
        "import moeflux\n"
        "from moeflux.log import LOG\n"
        "with moeflux.load(threads=1) as model:\n"
        "    model.session().complete('Once', max_tokens=2)\n"
        "LOG.warning('loud')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
