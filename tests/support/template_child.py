"""A process that has loaded a model by its plan and renders whatever templates it is told to, for tests that limit it.

It prints the plan's total and its part for the renderer, and waits for a line. Every further line is a template as
JSON. For each, it prints how that ended (the name of the error, or "text", and its words), and the peak of its own
memory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import moeflux
from moeflux import Error, builtin
from moeflux.machine.memory import resident
from moeflux.machine.sandbox import RENDERING, Sandbox
from moeflux.runtime.plan import plan
from moeflux.text.template import PACKAGES, PROGRAM, Template

SECONDS = 0.15  # a quick test: the memory is that of a plan


def load() -> moeflux.Model:
    path, options = builtin.path(), {"context": 64, "threads": 1, "readers": 1}
    for attempt in range(3):  # the floor moves by a step when the process grows over the border of one
        try:
            return moeflux.load(path, memory=plan(path, memory="1TB", **options).floor_bytes, **options)
        except moeflux.BudgetError:
            if attempt == 2:
                raise
    raise AssertionError


def main() -> None:
    model = load()
    print(model.plan.total_bytes, model.plan.parts["renderer"], flush=True)
    sys.stdin.readline()
    model.session().prefill([1, 2, 3])
    messages = [{"role": "user", "content": "hello"}]
    sandbox = Sandbox(PROGRAM, PACKAGES, replace(RENDERING, seconds=SECONDS, wait=60))
    for line in sys.stdin:
        try:
            ended = ("text", Template(json.loads(line), "t", sandbox).render({"messages": messages, "n": 7})[:100])
        except Error as error:
            ended = (type(error).__name__, str(error))
        print(json.dumps([*ended, resident().peak]), flush=True)


if __name__ == "__main__":
    main()
