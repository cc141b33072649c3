"""Commands that measure: `doctor`, `bench`, `eval`."""

from __future__ import annotations

import argparse
import contextlib
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moeflux.cli.arguments import (
    MODEL_HELP,
    SHAPE_HELP,
    Commands,
    Parser,
    add_devices,
    add_loading,
    add_plot,
    add_sampling,
    check_plot,
    command,
    load_model,
    load_options,
    print_value,
    sampling_options,
    whole_number,
    whole_numbers,
)

if TYPE_CHECKING:
    from moeflux.model import Model

__all__ = ["add"]

DOCTOR_HELP = "what this disk and this machine can do, and the settings that follow"
DOCTOR = """\
Reads the disk under FOLDER as the engine does when it decodes: an expert's bytes at a random place, 1 to 8 at a time,
past the page cache and through it. If FOLDER is a store, it reads the store's own experts. Otherwise it writes a file
of at most 1 GB and removes it again. It also measures memory, and prints what limits there are. It remembers the
results in the user's cache folder ($MOEFLUX_CACHE, else the system's), for this machine and this disk. From then on,
models are opened with these settings unless you ask for others. It takes about 15 seconds, or 3 with --quick. Close
other programs meanwhile.

With --metal it looks at the GPU of a Mac instead, with --cuda at an NVIDIA GPU. It compiles every kernel, runs every op
on small numbers there and on the CPU, then runs a whole model. It prints a table for an issue if something fails, and
the status is then 1.

examples:
  moeflux doctor /ssd/a3b
  moeflux doctor /ssd --quick
  moeflux doctor --json
  moeflux doctor --metal
  moeflux doctor --cuda
"""

BENCH_HELP = "how fast a model runs here: cold and warm, prefill and decode"
BENCH = """\
Measures prefill and decode, cold and warm. Cold means that the model is opened anew, with its files dropped from the
page cache and no expert in memory. The columns are tokens a second; bytes per token that the engine asked for, and that
the disk gave to this process; experts found in memory; the share of the time spent waiting for reads; the share of the
necessary reads that look-ahead had begun; milliseconds that choosing a token took; and peak memory. They are medians of
the repetitions. Close other programs: two that compute at the same time halve each other's speed.

With --sessions, it measures how fast so many answers come when they are made together, warm: tokens a second of all,
how many times those of the first number that is, and of each; bytes read per token; experts found in memory; waiting;
the time between two tokens, median and 99th percentile; and peak memory. Give a temperature, or all may say the same.

A model that is not here, a preset or a repository, is not downloaded: only its config is fetched. Then the command
estimates the speed from the plan of its memory and what `moeflux doctor` measured on this disk, and says so.

examples:
  moeflux bench /ssd/a3b --expert-slots 2560
  moeflux bench /ssd/a3b --prefill 1024 --decode 64 --reps 5 --json
  moeflux bench /ssd/a3b --prompt-ids prompt.txt --look-ahead off
  moeflux bench /ssd/a3b --temperature 0.7 --top-p 0.95
  moeflux bench /ssd/a3b --devices 0,1                        the layers on two GPUs
  moeflux bench /ssd/a3b --sessions 1,2,4,8 --temperature 1 --plot sessions.svg
  moeflux bench a3b --memory 8GB                              an estimate, before any download
"""


EVAL_HELP = "how well a model predicts a text, and how far it is from others: what fewer bits cost"
EVAL = """\
Lets a model read a text in windows, and measures how well it predicts each next token: the loss, and perplexity, which
is exp of the loss. With --reference, a second model, or the same one with its own settings, reads the same text. Then
the command also measures how far apart their predictions are: the KL divergence, and how often both have the same first
choice. That is the price of fewer bits or fewer experts. Standard errors are over windows. The loading options apply to
MODEL. The reference is loaded as it is, and both are in memory at once.

With several models, it prints one table: bits a weight, size, perplexity, and the distance of each from the first, or
from --reference. They read the text together, a piece at a time, so all are in memory at once and share the budget.
Then the loading options apply to all.

examples:
  moeflux eval --text book.txt
  moeflux eval /ssd/a3b-2bit --text book.txt --reference /ssd/a3b
  moeflux eval /ssd/a3b-bf16 /ssd/a3b-4bit /ssd/a3b-3bit /ssd/a3b-2bit --text book.txt
  moeflux eval /ssd/a3b --text book.txt --reference /ssd/a3b --experts-per-token 4
  moeflux eval /ssd/a3b --text book.txt --reference /ssd/a3b --kv-dtype bf16 --json
"""


def add(commands: Commands) -> None:
    _add_doctor(command(commands, "doctor", _doctor, DOCTOR_HELP, DOCTOR))
    _add_bench(command(commands, "bench", _bench, BENCH_HELP, BENCH))
    _add_eval(command(commands, "eval", _eval, EVAL_HELP, EVAL))


# ---- doctor -----------------------------------------------------------------------------------------------------


def _add_doctor(command: Parser) -> None:
    command.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="a folder on the disk; default: this one"
    )
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="3 seconds, less exact")
    kind.add_argument("--metal", action="store_true", help="compare the GPU of a Mac with the CPU, instead")
    kind.add_argument("--cuda", action="store_true", help="compare an NVIDIA GPU with the CPU, instead")
    command.add_argument("--json", action="store_true", help="everything as JSON, sizes in exact bytes")


def _doctor(arguments: argparse.Namespace) -> int:
    from moeflux.errors import ArgumentError
    from moeflux.measure.doctor import examine
    from moeflux.measure.gpu_check import check_gpu
    from moeflux.progress import for_terminal

    if arguments.metal or arguments.cuda:
        backend: Literal["metal", "cuda"] = "metal" if arguments.metal else "cuda"
        if arguments.folder is not None:
            raise ArgumentError(f"--{backend}: expected no folder with it, found {arguments.folder}")
        report = check_gpu(backend, for_terminal())
        print_value(report, arguments.json)
        return 1 if report.failures else 0
    print_value(examine(arguments.folder or Path(), arguments.quick, for_terminal()), arguments.json)
    return 0


# ---- bench ------------------------------------------------------------------------------------------------------


def _add_bench(command: Parser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help=SHAPE_HELP)
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument("--prefill", type=whole_number(), default=256, metavar="N", help="random tokens; default: 256")
    prompt.add_argument(
        "--prompt-ids", type=Path, metavar="FILE", help="a text file of token ids, instead of random tokens"
    )
    command.add_argument(
        "--decode", type=whole_number(0), default=32, metavar="N", help="steps to measure; default: 32"
    )
    command.add_argument(
        "--random-decode",
        action="store_true",
        help="decode random tokens instead of the likeliest, so that no text repeats itself",
    )
    command.add_argument("--reps", type=whole_number(), default=1, metavar="N", help="repetitions; default: 1")
    command.add_argument(
        "--sessions",
        dest="together",
        type=whole_numbers,
        metavar="N,N,...",
        help="answers that are made together, as 1,2,4,8: decoding of each number instead",
    )
    add_plot(command, "draw the speeds, too")
    command.add_argument("--json", action="store_true", help="one line of JSON for each measurement")
    add_sampling(command, "the likeliest token, always, and a seed of 0")
    add_devices(command)
    add_loading(command, own="sessions")


def _bench(arguments: argparse.Namespace) -> int:
    import moeflux
    from moeflux.errors import ArgumentError
    from moeflux.measure.bench import bench, table
    from moeflux.measure.estimate import estimate
    from moeflux.progress import Lines, for_terminal
    from moeflux.runtime.tokens import read_prompt
    from moeflux.stores.store import open_store
    from moeflux.text.sampling import Sampling

    check_plot(arguments)
    folder = _folder_to_run(arguments.model)
    if arguments.together:
        return _bench_together(folder, arguments)
    if folder is None:
        if arguments.plot:
            raise ArgumentError(f"--plot: expected a model that is here, found {arguments.model}")
        if arguments.devices:
            raise ArgumentError(f"--devices: expected a model that is here, found {arguments.model}")
        options = load_options(arguments)
        print_value(estimate(arguments.model, progress=for_terminal(), **options), arguments.json)
        return 0
    prompt = None
    choosing: dict[str, Any] = {"seed": 0} | sampling_options(arguments)
    if arguments.prompt_ids:
        with open_store(folder) as store:
            prompt = read_prompt(arguments.prompt_ids, store.variant.vocab_size)
    rows = []
    for row in bench(
        folder,
        prefill=arguments.prefill,
        decode=arguments.decode,
        reps=arguments.reps,
        prompt=prompt,
        random_decode=arguments.random_decode,
        sampling=Sampling(**choosing),
        progress=Lines(),  # a bar would be measured too
        open_model=partial(moeflux.load, devices=arguments.devices),
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
    if arguments.plot:
        from moeflux.measure.plots import bench_plot, draw

        draw(arguments.plot, bench_plot(rows))
    return 0


def _bench_together(folder: Path | None, arguments: argparse.Namespace) -> int:
    from moeflux.errors import ArgumentError
    from moeflux.measure.together import bench_together, table_together
    from moeflux.progress import Lines
    from moeflux.text.sampling import Sampling

    if folder is None:
        raise ArgumentError(f"--sessions: expected a model that is here, found {arguments.model}")
    for name in ("prompt_ids", "random_decode", "devices"):
        if getattr(arguments, name):
            raise ArgumentError(f"--{name.replace('_', '-')}: expected none with --sessions")
    if not arguments.decode:
        raise ArgumentError("--decode: expected at least 1 with --sessions, found 0")
    choosing: dict[str, Any] = {"seed": 0} | sampling_options(arguments)
    rows = []
    for row in bench_together(
        folder,
        arguments.together,
        prefill=arguments.prefill,
        decode=arguments.decode,
        reps=arguments.reps,
        sampling=Sampling(**choosing),
        progress=Lines(),
        **load_options(arguments),
    ):
        rows.append(row)
        if arguments.json:
            print(json.dumps(row.to_dict()), flush=True)
    if not arguments.json:
        print(f"{rows[0].settings}\n{arguments.prefill} tokens prefill, {arguments.decode} steps\n")
        print(table_together(rows))
    if arguments.plot:
        from moeflux.measure.plots import draw, together_plot

        draw(arguments.plot, together_plot(rows))
    return 0


def _folder_to_run(name: str | None) -> Path | None:
    """The folder of a model that can be run here; None for one that must be downloaded or converted first."""
    import moeflux
    from moeflux.models.hub import find_downloaded, is_repository
    from moeflux.stores.planned import folder_that_runs
    from moeflux.stores.store import open_store

    if name is None or not is_repository(name):
        return folder_that_runs(name)
    downloaded = find_downloaded(name)
    with contextlib.suppress(moeflux.FormatError, moeflux.IoError):  # a part of it, or what needs converting
        if downloaded is not None:
            with open_store(downloaded):
                return downloaded
    return None


# ---- eval -------------------------------------------------------------------------------------------------------


def _add_eval(command: Parser) -> None:
    command.add_argument("models", nargs="*", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--text", type=Path, required=True, metavar="FILE", help="the text to read, in UTF-8")
    command.add_argument("--reference", metavar="MODEL", help="the model to compare with")
    command.add_argument(
        "--window", type=whole_number(), default=1024, metavar="N", help="tokens per window; default: 1024"
    )
    command.add_argument(
        "--overlap",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="tokens of a window that repeat the one before and are not counted; default: 0",
    )
    command.add_argument("--tokens", type=whole_number(), metavar="N", help="only the first N tokens of the text")
    add_plot(command, "draw the figures with their errors, too")
    command.add_argument("--json", action="store_true", help="everything as JSON")
    add_loading(command)


def _eval(arguments: argparse.Namespace) -> int:
    import moeflux
    from moeflux.measure.evaluate import evaluate
    from moeflux.measure.reading import read_text
    from moeflux.models.hub import find_model
    from moeflux.progress import Counting, for_terminal

    check_plot(arguments)
    text = read_text(arguments.text)
    if len(arguments.models) > 1:
        return _eval_several(text, arguments)
    model = load_model(next(iter(arguments.models), None), arguments)
    reference = None
    if arguments.reference is not None:
        reference = moeflux.load(find_model(arguments.reference, for_terminal()), threads=arguments.threads)
    tokens = _tokens_of_all([model, reference] if reference is not None else [model], text)
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
    if arguments.plot:
        from moeflux.measure.plots import draw, evaluation_plot

        draw(arguments.plot, evaluation_plot(result))
    return 0


def _eval_several(text: str, arguments: argparse.Namespace) -> int:
    import moeflux
    from moeflux.measure.compare import compare, share_of_budget
    from moeflux.models.hub import find_model
    from moeflux.progress import Counting, for_terminal

    names = list(arguments.models)
    if arguments.reference is not None and arguments.reference not in names:
        names.append(arguments.reference)
    progress = for_terminal(passing=True)
    folders = [find_model(name, progress) for name in names]
    options = load_options(arguments)
    budget = moeflux.plan(folders[0], **options).budget_bytes
    models = []
    for place, folder in enumerate(folders):
        if budget is not None:
            options["memory"] = share_of_budget(budget, place, len(folders))
        with Counting(progress, f"loading {names[place]}") as counting:
            models.append((names[place], moeflux.load(folder, **options, on_progress=counting)))
    tokens = _tokens_of_all([model for _, model in models], text)
    with Counting(progress, "reading", "tokens") as counting:
        result = compare(
            models,
            tokens[: arguments.tokens],
            reference=0 if arguments.reference is None else names.index(arguments.reference),
            window=arguments.window,
            overlap=arguments.overlap,
            on_progress=counting,
        )
    print_value(result, arguments.json)
    return 0


def _tokens_of_all(models: list[Model], text: str) -> list[int]:
    """All must cut the text into the same tokens, or there is nothing to compare."""
    from moeflux.errors import ArgumentError

    tokens = models[0].tokenizer.encode(text)
    for each in models[1:]:
        if each.tokenizer.encode(text) != tokens:
            raise ArgumentError(f"{each.path}: expected the tokenizer of {models[0].path}, found another one")
    return tokens
