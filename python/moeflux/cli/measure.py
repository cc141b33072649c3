"""Commands that measure: `trace`, `replay`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moeflux.cli.arguments import Commands, command

__all__ = ["add"]

TRACE_HELP = "run a model and record which experts its router picks"
TRACE = """\
Evaluates a prompt, and as many tokens behind it as asked for, each the likeliest, and writes down which experts the
router picked for every token in every layer. The file is small: one byte a pick, two with more than 256 experts. What
is picked depends on the model and the tokens alone, not on memory, cache or threads. Without a prompt the tokens are
random: then, and with a synthetic model, the picks spread more evenly than those of text.

examples:
  moeflux trace /ssd/a3b -o run.trace --prompt-ids prompt.txt --decode 200
  moeflux trace /tmp/tiny -o tiny.trace --tokens 1000 --seed 3
"""

REPLAY_HELP = "what other caches would have done with a recorded run: hit rates over policies and sizes"
REPLAY = """\
Plays a trace against the engine's own slot cache, with each policy at each size, and against the optimum, which knows
the future and which no policy can beat. Counted are the trace's tokens as if each were decoded behind the one before
it, from an empty cache, however the run evaluated them: a prefill picks the same experts, but reads each once a chunk,
so its hits would say little. Prints hit rates and bytes read a token, as a table and as a plot.

examples:
  moeflux replay run.trace
  moeflux replay run.trace --slots 10%,25%,1024 --policy lru,lfu
  moeflux replay run.trace --plot curves.svg
  moeflux replay run.trace --json
"""


def add(commands: Commands) -> None:
    _add_trace(command(commands, "trace", _trace, TRACE_HELP, TRACE))
    _add_replay(command(commands, "replay", _replay, REPLAY_HELP, REPLAY))


def whole(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text) < 1 << 31:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r:.40}")


def _add_engine(command: argparse.ArgumentParser) -> None:
    """What goes to `moeflux.load` as it is."""
    engine = command.add_argument_group("the engine")
    engine.add_argument("--threads", type=whole, metavar="N", help="that compute; usually one a core")
    engine.add_argument("--readers", type=whole, metavar="N", help="threads that read experts")
    engine.add_argument("--expert-slots", type=whole, metavar="N", help="experts held in memory; usually all")
    engine.add_argument("--chunk", type=whole, metavar="N", help="most tokens of a prefill step; usually 512")
    engine.add_argument("--reads", choices=("auto", "direct", "buffered"), help="of experts; usually auto")
    engine.add_argument("--cache", choices=("lru", "lfu", "none"), help="which expert goes; usually lru")
    engine.add_argument("--look-ahead", choices=("auto", "on", "off"), help="read what may be needed; usually auto")


ENGINE = ("threads", "readers", "expert_slots", "chunk", "reads", "cache", "look_ahead")


def _engine_options(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: value for name in ENGINE if (value := getattr(arguments, name)) is not None}


# ---- trace ------------------------------------------------------------------------------------------------------


def _add_trace(command: argparse.ArgumentParser) -> None:
    command.add_argument("store", type=Path, metavar="STORE", help="folder with a model")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt-ids", type=Path, metavar="FILE", help="a text file of token ids: white space or commas between them"
    )
    prompt.add_argument("--tokens", type=whole, default=512, metavar="N", help="random tokens instead; usually 512")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of the random tokens; usually 0")
    command.add_argument("--decode", type=whole, default=0, metavar="N", help="tokens behind the prompt; usually none")
    _add_engine(command)


def _trace(arguments: argparse.Namespace) -> int:
    import moeflux
    from moeflux.progress import counter, for_terminal
    from moeflux.trace import random_prompt, read_prompt, record

    if not arguments.output.absolute().parent.is_dir():
        raise moeflux.IoError(f"{arguments.output}: expected a folder to write into, found none")
    model = moeflux.load(arguments.store, **_engine_options(arguments))
    vocab = model.variant.vocab_size
    if arguments.prompt_ids:
        prompt = read_prompt(arguments.prompt_ids, vocab)
    else:
        prompt = random_prompt(arguments.tokens, vocab, arguments.seed)
    trace = record(model, prompt, arguments.decode, counter(for_terminal(), "tokens"))
    trace.save(arguments.output)
    print(f"{arguments.output}: {trace}")
    return 0


# ---- replay -----------------------------------------------------------------------------------------------------


def _add_replay(command: argparse.ArgumentParser) -> None:
    command.add_argument("trace", type=Path, metavar="FILE", help="what `moeflux trace` wrote")
    command.add_argument(
        "--slots", metavar="LIST", help="experts held: numbers, or shares of all as 25%%, with commas between them"
    )
    command.add_argument(
        "--policy", default="all", metavar="LIST", help="lru, lfu and none, with commas between them; usually all"
    )
    command.add_argument("--ring-depth", type=whole, default=2, metavar="N", help="as the engine's; usually 2")
    command.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves there, not below the table")
    command.add_argument("--json", action="store_true", help="every point as JSON, sizes in exact bytes")


def _replay(arguments: argparse.Namespace) -> int:
    from moeflux.replay import POLICIES, USUAL_SHARES, replay
    from moeflux.replay_plot import svg, text_plot
    from moeflux.tensor_file import write_atomically
    from moeflux.trace import Trace

    policies = POLICIES if arguments.policy == "all" else [word.strip() for word in arguments.policy.split(",")]
    slots = USUAL_SHARES if arguments.slots is None else arguments.slots.split(",")
    result = replay(Trace.load(arguments.trace), slots, policies, arguments.ring_depth)
    if arguments.plot:
        write_atomically(arguments.plot, iter([svg(result).encode()]))
    if arguments.json:
        print(json.dumps(result.to_dict(), indent=2))
        return 0
    print(result)
    print(f"\n{arguments.plot}: the curves" if arguments.plot else f"\n{text_plot(result)}")
    return 0
