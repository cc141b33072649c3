"""The layer that drafts: what it says is what the oracle says, at every place that a session can come to. And whatever
it says, no bit of any result changes."""

from __future__ import annotations

import itertools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moeflux
from golden import checkpoints, drafting
from moeflux import ArgumentError, Cancel, Cancelled, DeviceError, FormatError, oracle
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.conversion.verify import verify
from moeflux.measure.info import describe
from moeflux.oracle.drafting import draft, draft_logits
from moeflux.stores.store import Store, open_store
from support.agreement import disagreement
from support.engine import Folder, load_faulty, steps, tokens

NAMES = drafting.NAMES
DEVICES: dict[str, dict[str, Any]] = {
    "resident": {"threads": 2, "chunk": 7},
    "streamed": {"expert_slots": 9, "readers": 2, "look_ahead": "on"},
    "apart": {"apart": True, "chunk": 9},
    "deferred": {"deferred": True, "expert_slots": 9},
    "q8": {},
}
MARGIN = 0.002
"""Of the range of the logits: a guess that is likelier than all others by less may be another one in float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return partial(_folder, tmp_path_factory.mktemp("draft layer"))


def _folder(root: Path, name: str) -> Path:
    packed = root / name
    if not packed.exists():
        published = drafting.write(name, root / f"hf-{name}")
        config = (published / "config.json").read_text()
        (published / "config.json").write_text(
            re.sub(r'"max_position_embeddings": \d+', '"max_position_embeddings": 1024', config)
        )
        convert(published, packed, check="full", mtp=True)
        convert(published, root / f"{name}-plain", check="none")
    return packed


def plain(folder: Folder, name: str) -> Path:
    """The same store without the layer."""
    return folder(name).with_name(f"{name}-plain")


def drafting_model(folder: Folder, name: str, **options: Any) -> moeflux.Model:
    return load_faulty(folder(name), **{"speculate": "mtp"} | options)


class Said:
    """What the oracle says would follow, at any place of a text."""

    def __init__(self, store: Store) -> None:
        self.session = oracle.Session(store.variant, store)  # it remembers the weights

    def after(self, ids: list[int], count: int, unknown: int | None = None, first: int = 0) -> list[int] | None:
        """`count` guesses of what follows `ids`, or nothing where float32 may see it otherwise. The hidden state of
        token `unknown` counts as zeros. The layer has no rows of the tokens up to `first`."""
        session = self.session
        session.clear()
        hidden = session.hidden(ids[:-1])
        if unknown is not None:
            hidden[unknown] = 0
        guesses, logits = draft(session, hidden[first:], ids[first:-1], ids[-1], count)
        best = np.sort(logits, axis=-1)
        near = (best[:, -1] - best[:, -2]) / (best[:, -1] - best[:, 0])
        return guesses if near.min() > MARGIN else None


# ---- What it says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_is_transformers(name: str, tmp_path: Path) -> None:
    """The layer itself, run by transformers as a model of one layer; golden/drafting.py says how."""
    convert(drafting.write(name, tmp_path / "hf"), tmp_path / "packed", format=ConvertFormat.asked("bf16"), mtp=True)
    ids = checkpoints.token_ids(name)
    with open_store(tmp_path / "packed") as store:
        session = oracle.Session(store.variant, store)
        hidden = session.hidden(ids)[:-1]
        said = draft_logits(session, hidden, ids[1:])
    with np.load(drafting.DRAFTS) as golden:
        assert disagreement(said, golden[name]) == ""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_the_oracles_and_change_no_bit(folder: Folder, name: str, device: str) -> None:
    """Guesses that come true, in part and not at all, and prompts between them."""
    options = dict(DEVICES[device])
    session_options: dict[str, Any] = {"max_context": 128, **({"kv_dtype": "q8"} if device == "q8" else {})}
    model = drafting_model(folder, name, **options)
    session = model.session(**session_options)
    other = load_faulty(plain(folder, name)).session(**session_options)
    ids = tokens(20)
    assert np.array_equal(session.prefill(ids[:-1], logits="all"), other.prefill(ids[:-1], logits="all"))
    token, checked = ids.pop(), 0
    with open_store(folder(name)) as store:
        said = Said(store)
        for place, wanted in enumerate((0, 1, 2, 4, 1, 3, 0, 2)):
            ids.append(token)
            assert np.array_equal(session.step(token).numpy(), other.step(token).numpy())
            count = session.stats.drafted
            assert count >= 1
            guesses = said.after(ids, count) if device != "q8" else None
            for at in range(min(wanted, count)):
                token = foreseen(session, guesses[at] if guesses else None)
                checked += guesses is not None
                ids.append(token)
                assert np.array_equal(session.step(token).numpy(), other.step(token).numpy())
                assert session.stats.accepted == 1
            token = tokens(9, seed=place + 3)[-1]
            if place == 4:
                more = tokens(11, seed=5)
                ids += more
                assert np.array_equal(session.prefill(more, logits="all"), other.prefill(more, logits="all"))
    assert device == "q8" or checked > 4
    assert session.tokens == ids and session.total_stats.accepted >= 8


def foreseen(session: moeflux.Session, guess: int | None) -> int:
    """The token that the session foresees; it must be this one, if one is given."""
    found = [token for token in range(384) if session._core.foresees(token)]
    assert len(found) == 1 and guess in (None, found[0])
    return found[0]


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3"])
def test_guesses_after_going_back_and_elsewhere(folder: Folder, name: str) -> None:
    """Of a fork, after a rewind, a restored state and a clear: with all that the layer can know there."""
    model = drafting_model(folder, name)
    ids = tokens(24)
    with open_store(folder(name)) as store:
        said = Said(store)

        def check(session: moeflux.Session, before: list[int], **gone: Any) -> None:
            assert session.position == len(before)
            sure = ((token, said.after([*before, token], 4, **gone)) for token in range(77, 384))
            token, guesses = next((token, guesses) for token, guesses in sure if guesses)
            session.step(token)
            assert session.stats.drafted >= 1
            for guess in guesses[: session.stats.drafted]:
                assert foreseen(session, guess) == guess
                session.step(guess)

        session = model.session(max_context=64)
        session.prefill(ids[:12])
        session.checkpoint()
        session.prefill(ids[12:])
        check(session.fork(), ids)
        check(session.fork(12), ids[:12], unknown=11)
        session.step(5)
        session.rewind(12)
        check(session, ids[:12], unknown=11)
        session.clear()
        session.prefill(ids)
        check(session, ids)
        fresh = model.session(max_context=64)
        full = model.session(max_context=64)
        full.prefill(ids[:12])
        fresh.restore(full.snapshot())
        fresh.step(ids[12])
        assert fresh.stats.drafted == 0, "nothing is known of the token before"
        fresh.prefill(ids[13:])
        check(fresh, ids, first=12)


def test_guesses_for_many_at_once(folder: Folder) -> None:
    """More sessions than one call of the layer takes, some that read, and one whose text repeats another's."""
    model = drafting_model(folder, "qwen3_next", chunk=128)
    alone = load_faulty(plain(folder, "qwen3_next"))
    sessions = [(model.session(max_context=32), alone.session(max_context=32)) for _ in range(20)]
    texts = [tokens(3 + i % 4, seed=i) for i in range(len(sessions))]
    for pair, text in zip(sessions, texts, strict=True):
        for session in pair:
            session.prefill(text)
    with open_store(folder("qwen3_next")) as store:
        said, checked = Said(store), 0
        for turn in range(2):
            work = [[30 + i] for i in range(18)] + [tokens(5, seed=turn), tokens(2, seed=turn)]
            found = model.evaluate([(pair[0], part) for pair, part in zip(sessions, work, strict=True)])
            for i, (mine, other) in enumerate(sessions):
                assert np.array_equal(found[i].numpy(), other.prefill(work[i]).numpy())
                texts[i] = texts[i] + work[i]
                if len(work[i]) > 1:
                    continue
                count = mine.stats.drafted
                assert count >= 1
                if (guesses := said.after(texts[i], count)) is not None:
                    foreseen(mine, guesses[0])
                    checked += 1
        assert checked > 20


def test_other_guesses_are_evaluated_in_its_place(folder: Folder) -> None:
    """As bench/peers/speculation.py does it: the layer runs, and what counts is a text that is known."""
    text = tokens(60)
    model = drafting_model(folder, "qwen3_5_moe", text=text, right=0.7)
    session, other = model.session(max_context=64), load_faulty(plain(folder, "qwen3_5_moe")).session(max_context=64)
    for token in text:
        assert np.array_equal(session.step(token).numpy(), other.step(token).numpy())
    total = session.total_stats
    assert 0.4 < total.accepted / total.drafted < 0.8


# ---- What goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3"])
def test_a_call_that_fails(folder: Folder, name: str) -> None:
    """One op in 43, each in a run of its own. The session is where it was and goes on, or it says that it cannot."""
    walk = [*tokens(5), *tokens(3, seed=9)]
    expected = steps(load_faulty(plain(folder, name)).session(max_context=32), walk)
    failed = 0
    for op in itertools.count(0, 43):
        session, before = drafting_model(folder, name, fail_at_op=op).session(max_context=32), failed
        found: list[np.ndarray] = []
        while len(found) < len(walk):
            try:
                logits = session.step(walk[len(found)])
                try:
                    found.append(logits.numpy())
                except DeviceError:  # the step is made, and only a copy of its logits failed
                    failed += 1
                    found.append(logits.numpy())
                continue
            except DeviceError:
                failed += 1
            assert session.position == len(found)
            try:
                session.snapshot()
            except moeflux.StateError:
                session.clear()
                found.clear()
        assert np.array_equal(np.stack(found), expected)
        if failed == before:
            break  # all of its ops came before this one
    assert failed > 20


def test_a_call_that_is_given_up(folder: Folder) -> None:
    session = drafting_model(folder, "qwen3_next").session(max_context=64)
    other = load_faulty(plain(folder, "qwen3_next")).session(max_context=64)
    session.prefill(tokens(9))
    other.prefill(tokens(9))
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        session.step(3, cancel=cancel)
    assert session.position == 9
    assert np.array_equal(steps(session, tokens(6)), steps(other, tokens(6)))


def test_memory_is_as_planned(folder: Folder) -> None:
    for speculate in ("mtp", "auto", "off"):
        with moeflux.load(folder("qwen3_5_moe"), context=300, speculate=speculate, memory=None) as model:
            session = model.session()
            session.prefill(tokens(290))
            held, planned = model.memory.held, model.plan.parts
            assert sum(held.values()) == model._engine.held
            assert all(held[part] == planned[part] for part in held if part != "loading")  # which is given back
            assert model.plan.experts == 16 * (5 if speculate != "off" else 4)
            session.close()


def test_no_memory_for_its_rows(folder: Folder) -> None:
    """A call that has no room for them is refused as any other, and takes nothing."""
    free = drafting_model(folder, "deepseek_v3")
    with free.session(max_context=512) as session:
        session.prefill(tokens(250))
        limit = free._engine.memory.sessions
    tight = drafting_model(folder, "deepseek_v3", session_bytes=limit + (1 << 16))
    session, other = tight.session(max_context=250), None
    session.prefill(tokens(250))
    held = tight._engine.memory.sessions
    with pytest.raises(moeflux.BudgetError):
        other = tight.session(max_context=512)
        other.prefill(tokens(250))
    del other
    assert tight._engine.memory.sessions >= held
    assert session.position == 250


# ---- Where it is kept ---------------------------------------------------------------------------------------------


def test_a_store_with_it_and_one_without(folder: Folder) -> None:
    """They are the same model: with one fingerprint, so that states of one fit the other."""
    with open_store(folder("deepseek_v3")) as whole, open_store(plain(folder, "deepseek_v3")) as less:
        assert whole.variant.draft is not None and less.variant.draft is None
        assert whole.variant.without_draft() == less.variant
        assert whole.fingerprint == less.fingerprint
        assert moeflux.Variant.from_dict(whole.variant.to_dict()) == whole.variant
    one, two = drafting_model(folder, "deepseek_v3"), load_faulty(plain(folder, "deepseek_v3"))
    session, other = one.session(max_context=64), two.session(max_context=64)
    session.prefill(tokens(9))
    other.restore(session.snapshot())
    assert np.array_equal(steps(other, tokens(3)), steps(session, tokens(3)))
    assert verify(folder("deepseek_v3")).ok
    text = str(describe(folder("deepseek_v3")))
    assert "layer that drafts" in text and "layer that drafts" not in str(describe(plain(folder, "deepseek_v3")))


@pytest.mark.parametrize("word", ["off", "lookup"])
def test_it_takes_no_memory_where_nobody_wants_it(folder: Folder, by_the_block: dict[str, Any], word: str) -> None:
    kept, less = (
        load_faulty(path, speculate=word, **by_the_block)
        for path in (folder("qwen3_next"), plain(folder, "qwen3_next"))
    )
    assert kept._engine.held == less._engine.held


def test_a_model_without_it(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"expected a model with a layer that drafts .* found .* without"):
        load_faulty(plain(folder, "qwen3_next"), speculate="mtp")
    with pytest.raises(ArgumentError, match="speculate"):
        moeflux.load(plain(folder, "qwen3_next"), speculate="mtp")
    with pytest.raises(ArgumentError, match=r"expected a checkpoint with a layer for multi-token prediction"):
        convert(checkpoints.write("deepseek_v3", tmp_path / "a"), tmp_path / "b", mtp=True)
    with pytest.raises(ArgumentError, match="whose layer that drafts is known, found one of qwen3_moe"):
        convert(checkpoints.write("qwen3_moe", tmp_path / "c"), tmp_path / "d", mtp=True)
    own = drafting.write("qwen3_next", tmp_path / "e")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"mtp_use_dedicated_embeddings": True}))
    with pytest.raises(FormatError, match="mtp_use_dedicated_embeddings: expected false, found true"):
        convert(own, tmp_path / "f", mtp=True)


def test_auto_watches_first_and_then_asks_the_layer(folder: Folder) -> None:
    session = drafting_model(folder, "qwen3_next", speculate="auto").session(max_context=64)
    steps(session, tokens(17))
    assert session.total_stats.drafted == 0
    steps(session, tokens(3))
    assert session.total_stats.drafted > 0
