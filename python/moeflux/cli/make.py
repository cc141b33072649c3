"""Commands that make stores: `convert`, `synth`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from moeflux.cli.arguments import MAX_SEED, Commands, Parser, command, whole_number

if TYPE_CHECKING:
    from moeflux.conversion.convert import ConvertFormat
    from moeflux.conversion.importance import Calibration
    from moeflux.models.variants import Variant
    from moeflux.progress import Progress

__all__ = ["add"]

CONVERT_HELP = "make a packed store of an MLX folder or a Hugging Face checkpoint"
CONVERT = """\
Writes DEST, a packed store. One file holds the dense weights, and one file per layer holds its experts, each in one
piece, so that it takes one read. An MLX folder is repacked byte for byte. A Hugging Face checkpoint (bf16, fp16, f32,
or fp8 with block scales) is quantised as mlx_lm.convert would do it, or to GGUF's blocks, with which the CPU computes.
Matrices that are int4 or NVFP4 already, as compressed-tensors, AutoAWQ, GPTQ or modelopt have them, are taken as they
are, and with --bits fp8 those in fp8. With --calibrate, a model first reads a text, and scales are chosen so that
errors are small in the columns that matter there: as many bits, closer to the original. The store grows in DEST.partial
and gets its name when it is complete and checked. To continue a run that was stopped, give the same command again. Only
one run at a time writes to a DEST. Memory stays below 2 GB, besides what the model that reads the text takes.

examples:
  moeflux convert ~/models/Qwen3.6-35B-A3B-4bit /ssd/a3b            an MLX folder, repacked
  moeflux convert ~/models/Qwen3.6-35B-A3B /ssd/a3b --bits 4        a Hugging Face checkpoint, quantised
  moeflux convert ~/models/Qwen3.6-35B-A3B /ssd/a3b --dry-run       only what would be written, and whether it fits
  moeflux convert ~/models/Qwen3.6-35B-A3B /ssd/a3b --bits 3 --dense-bits 6 --group-size 32
  moeflux convert ~/models/Qwen3.6-35B-A3B /ssd/a3b --bits 3 --calibrate text.txt
  moeflux convert ~/models/Qwen3.6-35B-A3B /ssd/a3b --bits q4_k --dense-bits q6_k
"""

SYNTH_HELP = "make a random model of any shape"
SYNTH = """\
Writes a packed store of random weights in the shape of a preset or of a config.json, with fewer layers, tokens and
experts if asked. Activations and routing behave as in a trained model (some experts are popular), but the text that it
writes is noise. The same flags give the same bytes. Such a model is good for tests and benchmarks, and shows before a
download whether a model of that size works on a machine.

examples:
  moeflux synth /tmp/tiny --variant a3b --layers 4 --experts 16 --vocab 1024
  moeflux synth /ssd/a17b --variant a17b                        all of it: 223 GB
  moeflux synth /tmp/mine --config ~/models/mine/config.json --layers 8 --bits 3 --seed 7
"""


def add(commands: Commands) -> None:
    _add_convert(command(commands, "convert", _convert, CONVERT_HELP, CONVERT))
    _add_synth(command(commands, "synth", _synth, SYNTH_HELP, SYNTH))


# ---- convert ----------------------------------------------------------------------------------------------------


def _add_convert(command: Parser) -> None:
    source = "folder with config.json and *.safetensors, or a GGUF file"
    command.add_argument("source", type=Path, metavar="SRC", help=source)
    command.add_argument("dest", type=Path, metavar="DEST", help="folder to make")
    _add_format(command)
    command.add_argument(
        "--mtp",
        action="store_true",
        help="keep the layer that drafts (multi-token prediction), for --speculate mtp; default: drop it",
    )
    command.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="weigh errors by the activations that a column meets while a model reads this text, in UTF-8",
    )
    command.add_argument(
        "--calibrate-with",
        metavar="MODEL",
        help="the model that reads it, where SRC does not run as it is: another store of the same checkpoint",
    )
    command.add_argument("--force", action="store_true", help="replace an existing store, finished or not")
    command.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    command.add_argument(
        "--verify",
        choices=("quick", "full", "none"),
        default="quick",
        help="compare with the source: four experts of each layer (quick, the default), everything, or nothing",
    )


def _convert(arguments: argparse.Namespace) -> int:
    from moeflux.conversion.convert import convert
    from moeflux.conversion.destination import check_space
    from moeflux.progress import for_terminal

    progress = for_terminal()
    report = convert(
        arguments.source,
        arguments.dest,
        format=_asked_format(arguments),
        force=arguments.force,
        dry_run=arguments.dry_run,
        check=arguments.verify,
        mtp=arguments.mtp,
        calibration=_asked_calibration(arguments, progress),
        progress=progress,
    )
    print(report)
    if arguments.dry_run:
        check_space(arguments.dest, report.plan.needed)
    return 0


def _asked_calibration(arguments: argparse.Namespace, progress: Progress) -> Calibration | None:
    from moeflux.errors import ArgumentError
    from moeflux.measure.calibrate import calibration_of
    from moeflux.models.hub import find_model

    if arguments.calibrate is None:
        if arguments.calibrate_with is not None:
            raise ArgumentError("--calibrate-with: expected --calibrate with it")
        return None
    model = arguments.source if arguments.calibrate_with is None else find_model(arguments.calibrate_with, progress)
    return calibration_of(arguments.calibrate, model, progress=progress)


def _asked_format(arguments: argparse.Namespace) -> ConvertFormat | None:
    """The format, or None if no format flag was given: an MLX folder is then repacked and not changed."""
    if arguments.bits is None and arguments.group_size is None and arguments.dense_bits is None:
        return None
    from moeflux.conversion.convert import ConvertFormat
    from moeflux.models.model_files import files_of

    default = ConvertFormat.default(files_of(arguments.source).json_of("config.json"))
    return ConvertFormat.asked(
        arguments.bits or ("mxfp4" if default.experts.is_mxfp4 else default.experts.bits),
        arguments.group_size or default.experts.group_size,
        dense_bits=arguments.dense_bits,
        element=default.element,
    )


# ---- synth ------------------------------------------------------------------------------------------------------


def _add_synth(command: Parser) -> None:
    command.add_argument("folder", type=Path, metavar="DEST", help="folder to make")
    model = command.add_mutually_exclusive_group(required=True)
    model.add_argument("--variant", metavar="NAME", help="a preset, by name or an unambiguous part of it")
    model.add_argument("--config", type=Path, metavar="FILE", help="a config.json, or the folder with it")
    for flag, meaning in (
        ("--layers", "number of layers; more than the model has repeat its pattern"),
        ("--vocab", "tokens of the vocabulary"),
        ("--experts", "experts per layer"),
        ("--experts-per-token", "how many of them the router picks"),
    ):
        command.add_argument(flag, type=whole_number(), metavar="N", help=meaning)
    command.add_argument("--mtp", action="store_true", help="with the layer that drafts, for --speculate mtp")
    _add_format(command)
    command.add_argument(
        "--seed",
        type=whole_number(0, MAX_SEED),
        default=0,
        metavar="N",
        help="another seed gives other weights; default: 0",
    )
    command.add_argument("--force", action="store_true", help="replace an existing store, finished or not")


def _synth(arguments: argparse.Namespace) -> int:
    from moeflux.conversion.convert import ConvertFormat
    from moeflux.conversion.synth import synth
    from moeflux.progress import for_terminal

    report = synth(
        arguments.folder,
        _asked_variant(arguments),
        seed=arguments.seed,
        format=ConvertFormat.asked(arguments.bits or 4, arguments.group_size or 64, dense_bits=arguments.dense_bits),
        force=arguments.force,
        progress=for_terminal(),
    )
    print(report)
    return 0


def _asked_variant(arguments: argparse.Namespace) -> Variant:
    """The model to imitate, in the shape that the flags give it. A top-k from a flag is its own, and so not lossy."""
    from moeflux.models.config import variant_from_config
    from moeflux.models.layers import RoutedExperts
    from moeflux.models.presets import preset

    model = preset(arguments.variant) if arguments.variant else variant_from_config(arguments.config)
    asked = {"count": arguments.experts, "per_token": arguments.experts_per_token}
    experts = {field: value for field, value in asked.items() if value is not None}
    shape = {} if arguments.vocab is None else {"vocab_size": arguments.vocab}
    if arguments.layers is not None:
        model = model.with_layers(arguments.layers)
    if experts:
        model = model.with_parts(RoutedExperts, **experts)
    if shape or experts or arguments.layers is not None:
        model = dataclasses.replace(model, name=f"{model.name}-synthetic", **shape)
    return model.with_draft() if arguments.mtp else model


# ---- The format of weights --------------------------------------------------------------------------------------


BITS = (2, 3, 4, 5, 6, 8)
BLOCKS = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0")  # as stores.storage has them, which needs NumPy


def _bits(text: str) -> int | str:
    if text.lower() in ("bf16", *BLOCKS):
        return text.lower()
    if text.isdecimal() and int(text) in BITS:
        return int(text)
    why = "; MLX has no codes of 7 bits, take 6 or 8" if text == "7" else ""
    raise argparse.ArgumentTypeError(f"expected {', '.join(map(str, (*BITS, *BLOCKS)))} or bf16, found {text!r}{why}")


def _expert_bits(text: str) -> int | str:
    return text.lower() if text.lower() in ("mxfp4", "fp8") else _bits(text)


def _add_format(command: Parser) -> None:
    command.add_argument(
        "--bits",
        type=_expert_bits,
        metavar="N|TYPE",
        help="bits of a weight: 2, 3, 4, 5, 6, 8 or bf16, or GGUF's blocks q8_0, q6_k, q5_k, q4_k or q4_0, or mxfp4 "
        "for experts alone, or fp8 as published; default: 4, or mxfp4 if that is published",
    )
    command.add_argument(
        "--group-size",
        type=whole_number(),
        choices=(32, 64, 128),
        help="weights that share a scale and a bias; default: 64",
    )
    command.add_argument(
        "--dense-bits", type=_bits, metavar="N|TYPE", help="bits of all but the experts; default: as --bits"
    )
