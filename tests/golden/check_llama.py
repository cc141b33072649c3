"""Logits of llama.cpp itself, on the same GGUF file (`make peers`).

    python tests/golden/check_llama.py build/peers [CHECKPOINT ...]

llama.cpp is built from the sdist that check_gguf.py fetches: ten minutes or more, once. The files have the golden
checkpoints in f32, because llama.cpp rounds activations to 8 bits where weights are quantised, and then picks other
experts now and then. The engine, with activations in f32, must give its logits: a cosine of 0.9999 after each token,
and the same likeliest token where that is clear.

Not here: qwen3_next and qwen3_5_moe, whose checkpoints have keys and values of other widths than llama.cpp allows,
olmoe (a norm of its keys likewise), and three of which llama.cpp's logits are others: deepseek_v2 and glm4_moe_lite,
whose routers it takes for those of published models by their sizes, and gpt_oss. Why gpt_oss differs is not known; the
engine gives transformers' logits for it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moeflux
from golden.check_gguf import sources
from support import gguf_files
from support.gguf_tokens import add_tokenizer

CHECKPOINTS = ("qwen3_moe", "qwen2_moe", "mixtral", "minimax_m2", "glm4_moe", "deepseek_v3")
IDS = [1, 100, 50, 10, 42, 3, 77, 9, 200, 5, 301, 77, 8, 8, 150, 33]
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
    file = gguf_files.write(name, folder / f"{name}.gguf", type="F32", tokens=False, change=in_full)
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
        results = [agrees(program, name, Path(folder)) for name in sys.argv[2:] or CHECKPOINTS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
