"""The built-in model, a quarter of whose experts fit in memory, goes on with a story and answers: python tools/demo.py

Everything here is a command of the README; what it costs is printed after each answer.
"""

from __future__ import annotations

import shlex
import sys

from moeflux import cli

STREAMED = "--expert-slots 64 --reads direct"  # of 256, past the page cache: the disk is really read
COMMANDS = (
    f"run --raw -p 'Once upon a time, there was a little fox who' --temperature 0 -n 72 --stats {STREAMED}",
    f"run -p 'What is the capital of France?' --temperature 0 --stats {STREAMED}",
)
NEXT = """
The model has 256 experts and kept 64 in memory; the others were read when the router picked them. Next:
  moeflux chat                    talk with it (source .venv/bin/activate first)
  moeflux run --help              what else there is
  moeflux info Qwen3.6-35B-A3B    what a large model costs"""


def main() -> int:
    for line in COMMANDS:
        print(f"$ moeflux {line}", flush=True)
        status = cli.main(shlex.split(line))
        if status:
            return status
        print()
    print(NEXT.strip("\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
