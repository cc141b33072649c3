"""The built-in model continues a story: with all experts in memory, then with room for a few: python tools/demo.py

Everything here is a command of the README. After each answer, its cost is printed.
"""

from __future__ import annotations

import gc
import shlex
import sys

from moeflux import builtin, cli
from moeflux.runtime.plan import plan
from moeflux.runtime.plan_table import Plan
from moeflux.sizes import size_text

STORY = "run --raw -p 'Once upon a time, there was a little fox who' --temperature 0 -n 69 --stats"
QUESTION = "run -p 'What is the capital of France?' --temperature 0 --stats"
NEXT = """\
Next:
  moeflux chat                    talk with it (source .venv/bin/activate first)
  moeflux run --help              what else there is
  moeflux info Qwen3.6-35B-A3B    what a large model costs"""


def main() -> int:
    try:
        show(STORY)
        few = with_few_experts()
        memory = f"{few.budget_bytes // 10**6} MB"
        print(
            f"Now with {memory} for the whole process; {size_text(few.floor_bytes)} is the least. Beside Python\n"
            f"and what every token needs there is room for {few.slots} of the {few.experts} experts: the others are\n"
            "read when the router picks them.\n"
        )
        for line in (STORY, QUESTION):
            show(f"{line} --memory '{memory}'")
    except SystemExit as stop:
        return stop.code
    print(NEXT)
    return 0


def show(line: str) -> None:
    print(f"$ moeflux {line}", flush=True)
    if status := cli.main(shlex.split(line)):
        raise SystemExit(status)
    print(flush=True)


def with_few_experts() -> Plan:
    """A plan with room for a quarter of the experts. What a process has anyway differs from machine to machine."""
    gc.collect()  # the model of the run before
    free = plan(builtin.path(), memory=None)
    megabytes = -(-(free.floor_bytes + free.experts * free.slot_bytes // 4) // 10**6)
    return plan(builtin.path(), memory=f"{megabytes}MB")


if __name__ == "__main__":
    sys.exit(main())
