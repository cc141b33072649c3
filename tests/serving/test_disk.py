"""States on disk: they survive restarts, stay within their quota, say nothing about what they hold, and no damage to
them changes an answer."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from pathlib import Path

import numpy as np
import pytest

import moeflux
from moeflux import Sampling
from moeflux.serving import Request, Scheduler
from moeflux.serving.disk import DiskTier
from moeflux.serving.protocols import ServedSession
from support.engine import Folder, load_faulty
from support.served import Alone, Gate, text, until

INSTRUCTIONS = text(150, seed=5)


@pytest.fixture(scope="module", params=["qwen3_5_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest, folder: Folder) -> moeflux.Model:
    return load_faulty(folder(request.param))


def ask(seed: int, said: list[int] | None = None) -> Request:
    prompt = (INSTRUCTIONS if said is None else said) + text(30, seed)
    return Request(prompt, max_tokens=5, sampling=Sampling(1.0, seed=seed), borders=[len(INSTRUCTIONS), len(prompt)])


def reused(scheduler: Scheduler, alone: Alone, request: Request) -> int:
    answer = scheduler.submit(request).wait()
    assert (answer.tokens, answer.finish) == alone(request)
    return answer.stats.reused_tokens


def saved(disk: Path) -> list[Path]:
    return sorted(disk.glob("*.session"))


def test_two_at_the_same_time_find_what_the_other_has_written(
    model: moeflux.Model, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeflux.serving.disk.LOOK_SECONDS", 0.0)
    disk = tmp_path / "states"
    with Scheduler(model, disk=disk) as other:
        with Scheduler(model, disk=disk) as scheduler:
            first = ask(1)
            assert reused(scheduler, alone, first) == 0
        said = [*first.prompt, *alone(first)[0]]
        assert reused(other, alone, ask(2, said)) == len(said) - 1
        for file in saved(disk):
            file.unlink()
        assert reused(other, alone, ask(9, text(160, seed=77))) == 0
        assert other.stats.saved == 0, "what somebody else has removed is no state any more"


def test_a_damaged_state_is_tried_once(
    model: moeflux.Model,
    alone: Alone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("moeflux.serving.disk.LOOK_SECONDS", 0.0)
    disk = tmp_path / "states"
    with Scheduler(model, disk=disk) as scheduler:
        first = ask(1)
        assert reused(scheduler, alone, first) == 0
    said = [*first.prompt, *alone(first)[0]]
    for file in saved(disk):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    with Scheduler(model, disk=disk) as scheduler, caplog.at_level(logging.WARNING, "moeflux"):
        for seed in (2, 3, 4):
            reused(scheduler, alone, ask(seed, said))
    assert len([each for each in caplog.messages if "a saved state is ignored" in each]) <= 2


def test_a_conversation_survives_a_restart(model: moeflux.Model, alone: Alone, tmp_path: Path) -> None:
    """And so do instructions that others share."""
    disk = tmp_path / "states"
    with Scheduler(model, disk=disk) as scheduler:
        first = ask(1)
        assert reused(scheduler, alone, first) == 0
    said = [*first.prompt, *alone(first)[0]]
    with Scheduler(model, disk=disk) as scheduler:
        assert scheduler.stats.saved == 2 and scheduler.stats.saved_bytes == sum(
            file.stat().st_size for file in saved(disk)
        )
        second = ask(2, said)
        assert reused(scheduler, alone, second) == len(said) - 1, "nothing but new text"
        assert reused(scheduler, alone, ask(3)) == len(INSTRUCTIONS)
    with Scheduler(model, disk=disk) as scheduler:
        said = [*second.prompt, *alone(second)[0]]
        assert reused(scheduler, alone, ask(4, said)) == len(said) - 1


def test_what_is_idle_moves_there(model: moeflux.Model, alone: Alone, tmp_path: Path) -> None:
    gate = Gate(opened=True)
    with Scheduler(model, decoder=gate, disk=tmp_path / "states", idle_seconds=0) as scheduler:
        first = ask(1)
        reused(scheduler, alone, first)
        until(lambda: scheduler.stats.saved == 2)
        assert scheduler.stats.idle == 0
        said = [*first.prompt, *alone(first)[0]]
        assert reused(scheduler, alone, ask(2, said)) == len(said) - 1


def test_who_waits_for_the_disk_keeps_nobody_waiting(
    model: moeflux.Model, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "states"
    with Scheduler(model, disk=disk) as scheduler:
        first = ask(1)
        reused(scheduler, alone, first)
    slow, done = Gate(), []
    read = DiskTier._read

    def late(self: DiskTier, name: str, session: ServedSession, ids: np.ndarray) -> bool:
        slow.enter(None)
        done.append(name)
        return read(self, name, session, ids)

    monkeypatch.setattr(DiskTier, "_read", late)
    with Scheduler(model, disk=disk, running=2) as scheduler:
        said = [*first.prompt, *alone(first)[0]]
        waiting = scheduler.submit(ask(2, said))
        slow.wait()
        other = Request(text(40, seed=77), max_tokens=5, sampling=Sampling(1.0, seed=1))
        assert reused(scheduler, alone, other) == 0 and not done
        slow.open()
        assert waiting.wait().stats.reused_tokens == len(said) - 1


def test_names_and_modes_say_nothing(model: moeflux.Model, alone: Alone, tmp_path: Path) -> None:
    disk = tmp_path / "states"
    disk.mkdir(mode=0o755)
    others = tmp_path / "others"
    for folder in (disk, others):
        with Scheduler(model, disk=folder) as scheduler:
            reused(scheduler, alone, ask(1))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.iterdir())
        assert all(re.fullmatch(r"[0-9a-f]{64}\.session", file.name) for file in saved(folder))
    assert not {file.name for file in saved(disk)} & {file.name for file in saved(others)}, "each has its own key"


def test_states_of_another_model_or_arithmetic_are_not_found(
    folder: Folder, model: moeflux.Model, alone: Alone, tmp_path: Path
) -> None:
    disk = tmp_path / "states"
    with Scheduler(model, disk=disk) as scheduler:
        reused(scheduler, alone, ask(1))
    said = [*ask(1).prompt, *alone(ask(1))[0]]
    for other in (moeflux.load(model.path, threads=1, precision="exact"), load_faulty(folder("qwen3_moe"))):
        with Scheduler(other, disk=disk) as scheduler:
            assert reused(scheduler, Alone(other), ask(2, said)) == 0
    with Scheduler(model, disk=disk) as scheduler:
        assert reused(scheduler, alone, ask(2, said)) == len(said) - 1, "its own are still there"


def damage(disk: Path, kind: str) -> None:
    """To both states."""
    one, other = saved(disk)
    if kind == "another state":
        one.rename(disk / "aside")
        other.rename(one)
        (disk / "aside").rename(other)
        return
    for path in (one, other):
        damage_one(path, kind)


def damage_one(path: Path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "a flipped bit":
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif kind == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.unlink()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("kind", ["a flipped bit", "cut", "empty", "a folder", "another state", "gone"])
def test_damaged_files_are_ignored(
    model: moeflux.Model, alone: Alone, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, when: str
) -> None:
    disk = tmp_path / "states"
    with Scheduler(model, disk=disk) as scheduler:
        reused(scheduler, alone, ask(1))
    said = [*ask(1).prompt, *alone(ask(1))[0]]
    if when == "before":
        damage(disk, kind)
    with caplog.at_level(logging.WARNING, "moeflux"), Scheduler(model, disk=disk) as scheduler:
        if when == "meanwhile":
            damage(disk, kind)
        found = [reused(scheduler, alone, ask(seed, said)) for seed in (2, 3)]
        assert found[0] == 0 and found[1] >= len(INSTRUCTIONS)
    assert ("ignored" in caplog.text) == ((kind, when) != ("gone", "before"))


def test_what_is_no_state_is_left_alone(
    model: moeflux.Model, alone: Alone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "states"
    disk.mkdir()
    (disk / "letter.txt").write_text("dear")
    os.utime(disk / "letter.txt", (0, 0))
    with caplog.at_level(logging.WARNING, "moeflux"), Scheduler(model, disk=disk) as scheduler:
        reused(scheduler, alone, ask(1))
    assert "letter.txt: expected saved states only, found something else" in caplog.text
    assert (disk / "letter.txt").read_text() == "dear"


def test_old_files_go_whatever_they_are(model: moeflux.Model, alone: Alone, tmp_path: Path) -> None:
    disk = tmp_path / "states"
    with Scheduler(model, disk=disk) as scheduler:
        reused(scheduler, alone, ask(1))
    good, damaged = saved(disk)
    damaged.write_bytes(b"nothing")
    for path in (good, damaged):
        os.utime(path, (time.time() - 1000,) * 2)
    with Scheduler(model, disk=disk, disk_seconds=2000) as scheduler:
        assert scheduler.stats.saved == 2
    with Scheduler(model, disk=disk, disk_seconds=500) as scheduler:
        assert scheduler.stats.saved == 0 and not saved(disk)


def test_the_quota_holds(model: moeflux.Model, alone: Alone, tmp_path: Path) -> None:
    """Those unused for longest go, damaged ones too."""
    disk = tmp_path / "states"
    one = ask(1)
    with Scheduler(model, disk=disk) as scheduler:
        reused(scheduler, alone, one)
    size = max(file.stat().st_size for file in saved(disk))
    quota = 3 * size
    for seed in range(2, 8):
        with Scheduler(model, disk=disk, disk_quota=quota) as scheduler:
            reused(scheduler, alone, ask(seed))
        assert sum(file.stat().st_size for file in saved(disk)) <= quota
    with Scheduler(model, disk=disk, disk_quota=quota) as scheduler:
        last = [*ask(7).prompt, *alone(ask(7))[0]]
        assert reused(scheduler, alone, ask(8, last)) == len(last) - 1
    with Scheduler(model, disk=disk, disk_quota=1) as scheduler:
        assert scheduler.stats.saved == 0
        reused(scheduler, alone, one)
    assert not saved(disk)


def test_a_clock_that_was_set_back(model: moeflux.Model, alone: Alone, tmp_path: Path) -> None:
    """What was written before has times that are still to come. It gives way to what is written now, all the same."""
    disk = tmp_path / "states"
    with Scheduler(model, disk=disk) as scheduler:
        reused(scheduler, alone, ask(1))
    quota = 3 * max(file.stat().st_size for file in saved(disk))
    for path in saved(disk):
        os.utime(path, (time.time() + 1e6,) * 2)
    for seed in (2, 3):
        with Scheduler(model, disk=disk, disk_quota=quota) as scheduler:
            reused(scheduler, alone, ask(seed))
    with Scheduler(model, disk=disk, disk_quota=quota) as scheduler:
        first = [*ask(2).prompt, *alone(ask(2))[0]]
        assert reused(scheduler, alone, ask(4, first)) == len(first) - 1


def test_a_disk_that_refuses_changes_no_answer(
    model: moeflux.Model,
    alone: Alone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(session: object, variant: object, fingerprint: str, path: Path) -> None:
        raise moeflux.IoError(f"{path}: No space left on device")

    monkeypatch.setattr("moeflux.serving.disk.save_state", full)
    with caplog.at_level(logging.WARNING, "moeflux"):
        with Scheduler(model, disk=tmp_path / "states", idle_seconds=0) as scheduler:
            first = ask(1)
            reused(scheduler, alone, first)
            until(lambda: not scheduler.stats.idle)
            assert reused(scheduler, alone, ask(2, [*first.prompt, *alone(first)[0]])) in (0, 150)
        assert "a state is not saved: " in caplog.text and scheduler.stats.saved == 0


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 33])
def test_a_damaged_key_is_replaced(model: moeflux.Model, tmp_path: Path, key: bytes) -> None:
    disk = tmp_path / "states"
    disk.mkdir()
    (disk / "key").write_bytes(key)
    with Scheduler(model, disk=disk):
        pass
    assert len((disk / "key").read_bytes()) == 32


def test_a_file_in_its_place_is_refused(model: moeflux.Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(moeflux.Error, match="file"):
        Scheduler(model, disk=tmp_path / "file")


def test_the_tier_finds_the_deepest_state(model: moeflux.Model, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "states", model, "me", 1 << 30, 1e9)
    ids = text(60, seed=3)
    for end in (10, 20, 40):
        session = model.session()
        session.prefill(ids[:end])
        tier.save(session, [end])
    tier.settle()
    for count, expected in ((60, 40), (41, 40), (40, 20), (15, 10), (10, 0)):
        assert tier.find(np.asarray(ids[:count], np.int32)) == expected
    other = np.asarray([*ids[:30], 0, 0, *ids[32:]], np.int32)
    assert tier.find(other) == 20
    assert tier.has(np.asarray(ids[:20], np.int32)) and not tier.has(np.asarray(ids[:21], np.int32))
    with model.session() as session:
        assert tier.fetch(session, other[:20]).result() and session.tokens == ids[:20]
    tier.close()
