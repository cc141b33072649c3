"""Commands about which experts a router picks: `trace`, `replay`."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from moeflux.cli.arguments import (
    MAX_SEED,
    MODEL_HELP,
    Commands,
    Parser,
    add_loading,
    add_plot,
    check_plot,
    command,
    load_model,
    whole_number,
)

__all__ = ["add"]

TRACE_HELP = "run a model and record which experts its router picks"
TRACE = """\
Evaluates a prompt, and then as many of the likeliest tokens as you ask for. It records which experts the router picked
for every token in every layer. The file is small: one byte per pick, or two with more than 256 experts. The picks
depend on the model and the tokens alone, not on memory, cache or threads. Without a prompt, the tokens are random.
Then, and with a synthetic model, the picks spread more evenly than those of text.

examples:
  moeflux trace /ssd/a3b -o run.trace --prompt-ids prompt.txt --decode 200
  moeflux trace /tmp/tiny -o tiny.trace --tokens 1000 --seed 3
  moeflux trace -o run.trace --plot picks.svg
"""

REPLAY_HELP = "how other caches would have done in a recorded run: hit rates by policy and size"
REPLAY = """\
Plays a trace against the engine's own slot cache, with each policy at each size. It also plays it against the optimum,
which knows the future and which no policy can beat. It counts the tokens as if they were decoded one after the other
from an empty cache, however the run evaluated them. A prefill picks the same experts but reads each once per chunk, so
its hits would say little. Prints hit rates and bytes read per token, as a table and as a plot.

examples:
  moeflux replay run.trace
  moeflux replay run.trace --slots 10%,25%,1024 --policy lru,lfu
  moeflux replay run.trace --plot curves.svg
  moeflux replay run.trace --json
"""


def add(commands: Commands) -> None:
    _add_trace(command(commands, "trace", _trace, TRACE_HELP, TRACE))
    _add_replay(command(commands, "replay", _replay, REPLAY_HELP, REPLAY))


# ---- trace ------------------------------------------------------------------------------------------------------


def _add_trace(command: Parser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt-ids", type=Path, metavar="FILE", help="a text file of token ids, separated by white space or commas"
    )
    prompt.add_argument(
        "--tokens", type=whole_number(), default=512, metavar="N", help="random tokens instead; default: 512"
    )
    command.add_argument(
        "--seed", type=whole_number(0, MAX_SEED), metavar="N", help="seed of the random tokens; default: 0"
    )
    command.add_argument(
        "--decode",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="tokens to decode after the prompt; default: none",
    )
    add_plot(command, "draw how evenly experts were picked")
    add_loading(command)


def _trace(arguments: argparse.Namespace) -> int:
    import moeflux
    from moeflux import files
    from moeflux.measure.record import record
    from moeflux.progress import Counting, for_terminal
    from moeflux.runtime.tokens import random_prompt, read_prompt

    if not files.is_folder(arguments.output.absolute().parent):
        raise moeflux.IoError(f"{arguments.output}: expected a folder to write into, found none")
    if arguments.prompt_ids and arguments.seed is not None:
        raise moeflux.ArgumentError("--seed: expected random tokens, found --prompt-ids")
    check_plot(arguments)
    model = load_model(arguments.model, arguments)
    vocab = model.variant.vocab_size
    if arguments.prompt_ids:
        prompt = read_prompt(arguments.prompt_ids, vocab)
    else:
        prompt = random_prompt(arguments.tokens, vocab, arguments.seed or 0)
    with Counting(for_terminal(passing=True), "recording", "tokens") as counting:
        trace = record(model, prompt, arguments.decode, counting)
    trace.save(arguments.output)
    print(f"{arguments.output}: {trace}")
    if arguments.plot:
        from moeflux.measure.plots import draw, trace_plot

        draw(arguments.plot, trace_plot(trace))
        print(f"{arguments.plot}: how evenly experts were picked")
    return 0


# ---- replay -----------------------------------------------------------------------------------------------------


def _add_replay(command: Parser) -> None:
    command.add_argument("trace", type=Path, metavar="FILE", help="a trace that `moeflux trace` wrote")
    command.add_argument(
        "--slots", metavar="LIST", help="experts held: numbers, or shares of all such as 25%%, separated by commas"
    )
    command.add_argument(
        "--policy", default="all", metavar="LIST", help="lru, lfu and none, separated by commas; default: all"
    )
    command.add_argument(
        "--ring-depth",
        type=whole_number(),
        default=2,
        metavar="N",
        help="expert batches in flight, as in the engine; default: 2",
    )
    add_plot(command, "draw the curves there instead of below the table")
    command.add_argument("--json", action="store_true", help="every point as JSON, sizes in exact bytes")


def _replay(arguments: argparse.Namespace) -> int:
    import moeflux
    from moeflux.measure.text_plot import text_plot
    from moeflux.routing.hit_rates import remember_replay
    from moeflux.routing.replay import DEFAULT_SHARES, POLICIES, replay
    from moeflux.routing.trace import Trace

    policies = POLICIES if arguments.policy == "all" else [word.strip() for word in arguments.policy.split(",")]
    check_plot(arguments)
    slots = DEFAULT_SHARES if arguments.slots is None else arguments.slots.split(",")
    result = replay(Trace.load(arguments.trace), slots, policies, arguments.ring_depth)
    if arguments.slots is None:
        # If it fails, only the hit rate of the next plan is less exact.
        with contextlib.suppress(OSError, moeflux.IoError):
            remember_replay(result)
    if arguments.plot:
        from moeflux.measure.plots import draw, replay_plot

        draw(arguments.plot, replay_plot(result))
    if arguments.json:
        print(json.dumps(result.to_dict(), indent=2))
        return 0
    print(result)
    print(f"\n{arguments.plot}: the curves" if arguments.plot else f"\n{text_plot(result)}")
    return 0
