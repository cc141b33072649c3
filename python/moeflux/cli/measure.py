"""Commands that measure: `doctor`, `trace`, `replay`, `bench`, `eval`."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

from moeflux import files
from moeflux.cli.arguments import (
    MODEL_HELP,
    MOST_SEED,
    Commands,
    Parser,
    add_loading,
    command,
    load_model,
    load_options,
    print_value,
    whole,
)

__all__ = ["add"]

DOCTOR_HELP = "what this disk and this machine can do, and the settings that follow"
DOCTOR = """\
Reads the disk under DIR as the engine does when it decodes: an expert's bytes at a random place, 1 to 8 at a time, past
the page cache and through it. When DIR is a store its own experts are read; elsewhere a file of at most 1 GB is written
and removed again. Measures memory too, and prints what limits there are. What it finds is remembered in the user's
cache folder ($MOEFLUX_CACHE, else the system's), for this machine and this disk: models are opened with these settings
from then on, unless others are asked for. Takes about 15 seconds, or 3; close other programs meanwhile.

With --metal it looks at the GPU of a Mac instead: compiles every kernel, runs every op on small numbers there and on
the CPU, then a whole model, and prints a table for an issue if something fails. The status is 1 then.

examples:
  moeflux doctor /ssd/a3b
  moeflux doctor /ssd --quick
  moeflux doctor --json
  moeflux doctor --metal
"""

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

BENCH_HELP = "how fast a model runs here: cold and warm, prefill and decode"
BENCH = """\
Measures prefill and decode, cold (opened anew, its files dropped from the page cache, no expert in memory) and warm.
Columns: tokens a second; bytes a token that the engine asked for, and that the disk gave to this process; experts found
in memory; the share of the time spent waiting for reads; the share of what had to be read that the look-ahead had
begun; the most memory. The median of the repetitions. Close other programs: two that compute halve each other.

examples:
  moeflux bench /ssd/a3b --expert-slots 2560
  moeflux bench /ssd/a3b --prefill 1024 --decode 64 --reps 5 --json
  moeflux bench /ssd/a3b --prompt-ids prompt.txt --look-ahead off
"""


EVAL_HELP = "how well a model foretells a text, and how far it is from another one"
EVAL = """\
Lets a model read a text in windows, and measures what it expected of each next token: the loss, and perplexity, which
is exp of it. With --reference, the same text is read by a second model, or by the same one with its own settings, and
the distance of their expectations is measured too: KL divergence, and how often both have the same first choice. That
is the price of fewer bits or of fewer experts. Standard errors are over windows. The options of loading are those of
MODEL; the reference is loaded as it is, and both are in memory at once.

examples:
  moeflux eval --text book.txt
  moeflux eval /ssd/a3b-2bit --text book.txt --reference /ssd/a3b
  moeflux eval /ssd/a3b --text book.txt --reference /ssd/a3b --experts-per-token 4
  moeflux eval /ssd/a3b --text book.txt --reference /ssd/a3b --kv-dtype bf16 --json
"""


def add(commands: Commands) -> None:
    _add_doctor(command(commands, "doctor", _doctor, DOCTOR_HELP, DOCTOR))
    _add_trace(command(commands, "trace", _trace, TRACE_HELP, TRACE))
    _add_replay(command(commands, "replay", _replay, REPLAY_HELP, REPLAY))
    _add_bench(command(commands, "bench", _bench, BENCH_HELP, BENCH))
    _add_eval(command(commands, "eval", _eval, EVAL_HELP, EVAL))


# ---- doctor -----------------------------------------------------------------------------------------------------


def _add_doctor(command: Parser) -> None:
    command.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="usually this folder")
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="3 seconds, less exact")
    kind.add_argument("--metal", action="store_true", help="the GPU of a Mac, held to the CPU, instead of the disk")
    command.add_argument("--json", action="store_true", help="everything as JSON, sizes in exact bytes")


def _doctor(arguments: argparse.Namespace) -> int:
    from moeflux.errors import StateError
    from moeflux.measure.doctor import examine
    from moeflux.measure.metal_check import check_metal
    from moeflux.progress import for_terminal

    if arguments.metal:
        if arguments.folder is not None:
            raise StateError(f"--metal: expected no folder with it, found {arguments.folder}")
        report = check_metal(for_terminal())
        print_value(report, arguments.json)
        return 1 if report.failures else 0
    print_value(examine(arguments.folder or Path(), arguments.quick, for_terminal()), arguments.json)
    return 0


# ---- trace ------------------------------------------------------------------------------------------------------


def _add_trace(command: Parser) -> None:
    command.add_argument("store", type=Path, metavar="STORE", help="folder with a model")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the trace to write")
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt-ids", type=Path, metavar="FILE", help="a text file of token ids: white space or commas between them"
    )
    prompt.add_argument("--tokens", type=whole(), default=512, metavar="N", help="random tokens instead; usually 512")
    command.add_argument("--seed", type=whole(0, MOST_SEED), metavar="S", help="of the random tokens; usually 0")
    command.add_argument("--decode", type=whole(0), default=0, metavar="N", help="tokens behind it; usually none")
    add_loading(command)


def _trace(arguments: argparse.Namespace) -> int:
    import moeflux
    from moeflux import files
    from moeflux.measure.record import record
    from moeflux.progress import counter, for_terminal
    from moeflux.runtime.tokens import random_prompt, read_prompt

    if not files.is_folder(arguments.output.absolute().parent):
        raise moeflux.IoError(f"{arguments.output}: expected a folder to write into, found none")
    if arguments.prompt_ids and arguments.seed is not None:
        raise moeflux.StateError("--seed: expected random tokens, found --prompt-ids")
    model = moeflux.load(arguments.store, **load_options(arguments))
    vocab = model.variant.vocab_size
    if arguments.prompt_ids:
        prompt = read_prompt(arguments.prompt_ids, vocab)
    else:
        prompt = random_prompt(arguments.tokens, vocab, arguments.seed or 0)
    trace = record(model, prompt, arguments.decode, counter(for_terminal(), "tokens"))
    trace.save(arguments.output)
    print(f"{arguments.output}: {trace}")
    return 0


# ---- replay -----------------------------------------------------------------------------------------------------


def _add_replay(command: Parser) -> None:
    command.add_argument("trace", type=Path, metavar="FILE", help="what `moeflux trace` wrote")
    command.add_argument(
        "--slots", metavar="LIST", help="experts held: numbers, or shares of all as 25%%, with commas between them"
    )
    command.add_argument(
        "--policy", default="all", metavar="LIST", help="lru, lfu and none, with commas between them; usually all"
    )
    command.add_argument("--ring-depth", type=whole(), default=2, metavar="N", help="as the engine's; usually 2")
    command.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the curves there, not below the table")
    command.add_argument("--json", action="store_true", help="every point as JSON, sizes in exact bytes")


def _replay(arguments: argparse.Namespace) -> int:
    import moeflux
    from moeflux.measure.replay_plot import svg, text_plot
    from moeflux.routing.hit_rates import remember_replay
    from moeflux.routing.replay import POLICIES, USUAL_SHARES, replay
    from moeflux.routing.trace import Trace

    policies = POLICIES if arguments.policy == "all" else [word.strip() for word in arguments.policy.split(",")]
    slots = USUAL_SHARES if arguments.slots is None else arguments.slots.split(",")
    result = replay(Trace.load(arguments.trace), slots, policies, arguments.ring_depth)
    if arguments.slots is None:
        # Should it fail, only the next plan's hit rate is the worse for it.
        with contextlib.suppress(OSError, moeflux.IoError):
            remember_replay(result)
    if arguments.plot:
        files.write_atomically(arguments.plot, [svg(result).encode()])
    if arguments.json:
        print(json.dumps(result.to_dict(), indent=2))
        return 0
    print(result)
    print(f"\n{arguments.plot}: the curves" if arguments.plot else f"\n{text_plot(result)}")
    return 0


# ---- bench ------------------------------------------------------------------------------------------------------


def _add_bench(command: Parser) -> None:
    command.add_argument("store", type=Path, metavar="STORE", help="folder with a model")
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument("--prefill", type=whole(), default=256, metavar="N", help="random tokens; usually 256")
    prompt.add_argument("--prompt-ids", type=Path, metavar="FILE", help="in their place, a text file of token ids")
    command.add_argument("--decode", type=whole(0), default=32, metavar="N", help="steps counted; usually 32")
    command.add_argument(
        "--random-decode", action="store_true", help="decode random tokens, not the likeliest: no text repeats itself"
    )
    command.add_argument("--reps", type=whole(), default=1, metavar="N", help="repetitions; usually 1")
    command.add_argument("--json", action="store_true", help="one JSON object a line for each measurement")
    add_loading(command)


def _bench(arguments: argparse.Namespace) -> int:
    from moeflux.measure.bench import bench, table
    from moeflux.progress import for_terminal
    from moeflux.runtime.tokens import read_prompt
    from moeflux.stores.store import open_store

    prompt = None
    if arguments.prompt_ids:
        with open_store(arguments.store) as store:
            prompt = read_prompt(arguments.prompt_ids, store.variant.vocab_size)
    rows = []
    for row in bench(
        arguments.store,
        prefill=arguments.prefill,
        decode=arguments.decode,
        reps=arguments.reps,
        prompt=prompt,
        random_decode=arguments.random_decode,
        note=for_terminal().note,
        **load_options(arguments),
    ):
        rows.append(row)
        if arguments.json:
            print(json.dumps(row.to_dict()), flush=True)
    if not arguments.json:
        print(rows[0].settings)
        by_phase = {row.phase: row.tokens for row in rows}
        print(", ".join(f"{tokens} tokens {phase}" for phase, tokens in by_phase.items()) + "\n")
        print(table(rows))
    return 0


# ---- eval -------------------------------------------------------------------------------------------------------


def _add_eval(command: Parser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--text", type=Path, required=True, metavar="FILE", help="what is read, UTF-8")
    command.add_argument("--reference", metavar="MODEL", help="what it is compared with")
    command.add_argument("--window", type=whole(), default=1024, metavar="N", help="tokens of a window; usually 1024")
    command.add_argument(
        "--overlap",
        type=whole(0),
        default=0,
        metavar="N",
        help="of them, from the window before, not counted; usually 0",
    )
    command.add_argument("--tokens", type=whole(), metavar="N", help="only the first so many of the text")
    command.add_argument("--json", action="store_true", help="everything as JSON")
    add_loading(command)


def _eval(arguments: argparse.Namespace) -> int:
    import moeflux
    from moeflux.measure.evaluate import evaluate, read_text
    from moeflux.models.hub import find_model
    from moeflux.progress import Counting, for_terminal

    text = read_text(arguments.text)
    model = load_model(arguments.model, arguments)
    reference = None
    if arguments.reference is not None:
        reference = moeflux.load(find_model(arguments.reference, for_terminal()), threads=arguments.threads)
    tokens = model.tokenizer.encode(text)
    if reference is not None and reference.tokenizer.encode(text) != tokens:
        raise moeflux.StateError("reference: expected the model's own tokenizer, found another one")
    with Counting(for_terminal(passing=True), "reading", "tokens") as counting:
        result = evaluate(
            model,
            tokens[: arguments.tokens],
            reference=reference,
            window=arguments.window,
            overlap=arguments.overlap,
            on_progress=counting,
        )
    print_value(result, arguments.json)
    return 0
