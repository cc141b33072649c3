"""A scheduler while somebody sets the system's clock forth and back: python tests/support/clocks_child.py FOLDER, with
jumping_clock.c preloaded. Deadlines, what is idle, pauses and figures go by a clock that nobody sets."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from pathlib import Path

import moeflux
from moeflux import Sampling
from moeflux.serving import Request, Scheduler
from support.engine import folders, load_faulty
from support.served import Alone, Gate, text, until

HOUR = 3600.0


def jumps() -> bool:
    found = [time.time()]
    for _ in range(20):
        time.sleep(0.01)
        found.append(time.time())
    return max(found) - min(found) > HOUR


def request(seed: int, deadline: float | None) -> Request:
    prompt = text(30, seed)
    return Request(prompt, max_tokens=6, sampling=Sampling(1.0, seed=seed), borders=[len(prompt)], deadline=deadline)


def whose_turn(model: moeflux.Model) -> float:
    """Seconds until a call that waits for another hears that it is cancelled."""
    busy, waiting = model.session(max_context=1024), model.session(max_context=64)
    go, ended = threading.Event(), []

    def hold(done: int, total: int) -> bool:
        go.set()
        time.sleep(0.3)
        return done < 6 * 16

    def ask() -> None:
        began = time.monotonic()
        try:
            waiting.generate(text(5), max_tokens=1, timeout=0.2).wait()
        finally:
            ended.append(time.monotonic() - began)

    holder = threading.Thread(target=lambda: busy.prefill(text(600), hold))
    holder.start()
    go.wait()
    asker = threading.Thread(target=ask)
    asker.start()
    holder.join()
    asker.join()
    return ended[0]


def main() -> None:
    root = Path(sys.argv[1])
    store = folders(root)("qwen3_5_moe")
    alone = Alone(load_faulty(store))
    model = load_faulty(store)
    with Scheduler(model, disk=root / "states", idle_seconds=0.5) as scheduler:
        for seed in range(12):
            asked = request(seed, HOUR)
            answer = scheduler.submit(asked).wait()
            assert (answer.tokens, answer.finish) == alone(request(seed, None)), "none is late"
        until(lambda: scheduler.stats.idle == 0 and scheduler.stats.saved >= 12)
        stats = scheduler.stats
        figures = {
            name: value
            for name, value in dataclasses.asdict(stats).items()
            if name.endswith(("_p50", "_p99")) and value is not None
        }
        assert figures and all(0 <= value < HOUR for value in figures.values()), figures
    gate = Gate()
    with Scheduler(model, decoder=gate) as scheduler:
        late = scheduler.submit(request(1, 0.5))
        gate.wait()
        time.sleep(0.6)
        gate.open()
        late.wait()
        assert late.finish == "timeout", late.finish
    print(json.dumps({"jumps": jumps(), "turn": whose_turn(model)}))


if __name__ == "__main__":
    main()
