"""Logits of llama.cpp itself, on the same GGUF file (`make peers`).

    python tests/golden/check_llama.py build/peers [CHECKPOINT ...]

llama.cpp is built from the sdist that check_gguf.py fetches: ten minutes or more, once. The files have the golden
checkpoints in f32, because llama.cpp rounds activations to 8 bits where weights are quantised, and then picks other
experts now and then. The engine, with activations in f32, must give its logits: a cosine of 0.9999 after each token,
and the same likeliest token where that is clear.

Some checkpoints have other shapes, or their files another value, than elsewhere, because llama.cpp takes for granted:
qwen3_next and qwen3_5_moe have keys as wide as values; olmoe has as many heads for keys as for queries; the router of
glm4_moe_lite is named, which it otherwise knows by the sizes of the published model; deepseek_v2 has no groups, of
which llama.cpp adds up the best two experts where the published model takes the best; and YaRN of gpt_oss mixes up to a
whole pair of channels, because llama.cpp rounds to whole pairs where the published model does not. With the sizes of
the golden file, that rounding is all by which gpt_oss differs. gemma4 comes near alone, because llama.cpp looks GELU up
in a table of f16.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moeflux
from golden import checkpoints, deepseek
from golden.check_gguf import sources
from golden.checkpoint import Checkpoint
from golden.gpt_oss import gpt_oss
from support import gguf_files
from support.gguf_tokens import add_tokenizer

CONTEXT = 32
"""For which gpt_oss was trained before YaRN."""


def sigmoid(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def sections(writer: gguf.GGUFWriter) -> None:
    """Of image positions, which all are those of the text here."""
    writer.add_rope_dimension_sections([3, 3, 2, 0])


def whole_pairs() -> Checkpoint:
    """The eighth pair of a head is the last that YaRN changes."""
    return gpt_oss(rope_theta=(CONTEXT / (2 * np.pi)) ** 2 * (1 + 1e-5))


@dataclass(frozen=True)
class Case:
    checkpoint: Callable[[], Checkpoint] | None = None
    """In place of that of the golden files."""
    says: Callable[[gguf.GGUFWriter], None] | None = None
    """Writes another value."""


CASES = {
    "qwen3_moe": Case(),
    "qwen2_moe": Case(),
    "mixtral": Case(),
    "minimax_m2": Case(),
    "glm4_moe": Case(),
    "deepseek_v3": Case(),
    "deepseek_v2": Case(lambda: deepseek.deepseek_v2(n_group=1, topk_group=1, topk_method="greedy")),
    "glm4_moe_lite": Case(says=sigmoid),
    "gpt_oss": Case(whole_pairs),
    "olmoe": Case(lambda: checkpoints.olmoe(num_key_value_heads=4)),
    "qwen3_next": Case(lambda: checkpoints.qwen3_next(linear_key_head_dim=64)),
    "gemma4": Case(),
    "qwen3_5_moe": Case(lambda: checkpoints.qwen3_5_moe(linear_key_head_dim=64), sections),
}
IDS = [(37 * i + 11) % 384 for i in range(60)]
"""More than a window, and than the context before YaRN."""
LEAST = 0.9999
CLEAR = 0.01
"""Of the range of the logits: by how much the first choice must lead the second to be clear."""
PLAIN = ["-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DBUILD_SHARED_LIBS=ON"]
PLAIN += [f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "EXAMPLES", "TOOLS", "SERVER")]


def built(folder: Path) -> Path:
    """The program that prints logits."""
    llama, place = sources(folder), folder / "logits"
    program = place / "llama_logits"
    if not program.exists():
        subprocess.run(["cmake", "-S", llama, "-B", place, "-DCMAKE_BUILD_TYPE=Release", *PLAIN], check=True)
        subprocess.run(["cmake", "--build", place, "--target", "llama", "--parallel", "2"], check=True)
        libraries = [f"-L{place}/bin", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{place.resolve()}/bin"]
        headers = [f"-I{llama}/include", f"-I{llama}/ggml/include"]
        source = Path(__file__).with_name("llama_logits.cpp")
        subprocess.run(["c++", "-std=c++20", *headers, source, *libraries, "-o", program], check=True)
    return program


def in_full(writer: gguf.GGUFWriter, tensors: gguf_files.Tensors) -> None:
    """What llama.cpp wants besides: a tokenizer with a merge, and no part of a layer for multi-token prediction.
    Experts in MXFP4 become f32."""
    add_tokenizer(writer, merges=["a b"])
    for name in [name for name in tensors if "nextn" in name]:
        del tensors[name]
    for name, array in tensors.items():
        if array.dtype == np.uint8:
            tensors[name] = gguf.quants.dequantize(array, gguf.GGMLQuantizationType.MXFP4)


def agrees(program: Path, name: str, folder: Path) -> bool:
    case = CASES[name]

    def change(writer: gguf.GGUFWriter, tensors: gguf_files.Tensors) -> None:
        in_full(writer, tensors)
        if case.says:
            case.says(writer)

    other = case.checkpoint() if case.checkpoint else None
    file = gguf_files.write(name, folder / f"{name}.gguf", type="F32", tokens=False, change=change, checkpoint=other)
    made = subprocess.run([program, file, *map(str, IDS)], capture_output=True)
    if made.returncode:
        print(f"{name:<14} llama.cpp failed: {made.stderr.decode()[-300:]}")
        return False
    theirs = np.frombuffer(made.stdout, np.float32).reshape(len(IDS), -1).astype(np.float64)
    with moeflux.load(file, precision="exact", memory=None, threads=1) as model:
        ours = model.session().prefill(IDS, logits="all").astype(np.float64)
    cosines = (theirs * ours).sum(axis=1) / np.sqrt((theirs**2).sum(axis=1) * (ours**2).sum(axis=1))
    best = np.sort(theirs, axis=1)
    clear = best[:, -1] - best[:, -2] > CLEAR * np.ptp(theirs)
    same = theirs.argmax(axis=1) == ours.argmax(axis=1)
    good = bool(cosines.min() >= LEAST and same[clear].all())
    print(
        f"{name:<14} {'ok' if good else 'DIFFERS'}: cosine at least {cosines.min():.9f}, same first choice "
        f"{same.sum()} of {len(IDS)} ({clear.sum()} clear)"
    )
    return good


def main() -> int:
    program = built(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        results = [agrees(program, name, Path(folder)) for name in sys.argv[2:] or CASES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
