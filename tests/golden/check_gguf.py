"""Files of llama.cpp's own converter, and its own vocabularies (`make peers`).

    python tests/golden/check_gguf.py build/peers [CHECKPOINT ...]

The sdist of llama-cpp-python carries llama.cpp's sources. Its converter makes a GGUF file of each checkpoint of the
golden files, whose logits in the oracle must be those of our own conversion: bit for bit, or to 1e-5 of their range
where the converter writes decays as another number. Its vocabularies have texts with the tokens that llama.cpp makes of
them, which must be ours.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import checkpoints
from moeflux import oracle
from moeflux.conversion.convert import ConvertFormat, convert
from moeflux.errors import FormatError
from moeflux.models.gguf import GgufValues
from moeflux.models.gguf_tokenizer import COMPOSED
from moeflux.stores.store import open_store
from moeflux.text.tokenizer import Tokenizer
from support.gguf_files import CHANGED, FAMILIES

SDIST = "llama-cpp-python==0.3.36"
IDS = [1, 100, 50, 10, 42, 3, 77, 9]
BETWEEN = "\n__ggml_vocab_test__\n"
LEAST_VOCABULARIES = 3
PREDICTING = ("qwen3_next", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite")
"""Of these, the checkpoints have no more than a part of the layers for multi-token prediction."""

WITHOUT_CLASS = ("gemma4_other",)
"""These do not say which class of transformers they are of, and so the converter does not know them."""
CUT = ("gemma4",)
"""Of these, the converter leaves out the embeddings that no token has."""

# The converter knows a tokenizer by what it makes of one text. Nobody else has that of the checkpoints, so its rules
# are named here.
CONVERTER = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from conversion import base
base.TextModel.get_vocab_base_pre = lambda *_: "qwen2"
base.TextModel._set_vocab_glm = base.TextModel._set_vocab_gpt2
from conversion import gemma
gemma.Gemma4Model.set_vocab = base.TextModel._set_vocab_gpt2
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.path[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def sources(folder: Path) -> Path:
    """llama.cpp's, fetched once."""
    if not list(folder.glob("llama_cpp_python-*/vendor/llama.cpp")):
        folder.mkdir(parents=True, exist_ok=True)
        download = ["download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder), SDIST]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    return next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))


def converted(llama: Path, checkpoint: Path, file: Path) -> Path:
    arguments = [str(llama), str(checkpoint), "--outfile", str(file), "--outtype", "bf16"]
    arguments += ["--no-mtp"] if checkpoint.name in PREDICTING else []
    made = subprocess.run([sys.executable, "-c", CONVERTER, *arguments], capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(f"{checkpoint.name}: the converter failed:\n{made.stderr[-3000:]}")
    return file


def logits_of(path: Path) -> np.ndarray:
    with open_store(path) as store:
        return oracle.Session(store.variant, store).prefill(IDS)


def check_checkpoint(llama: Path, name: str, folder: Path) -> bool:
    published = checkpoints.write(name, folder / name)
    file = converted(llama, published, folder / f"{name}.gguf")
    own = None if name == "gpt_oss" else ConvertFormat.asked("bf16")
    convert(published, folder / f"{name}-packed", format=own, check="none")
    found, wanted = logits_of(file), logits_of(folder / f"{name}-packed")
    if name in CUT:
        wanted = wanted[:, : found.shape[1]]
    off = float(np.abs(found - wanted).max() / np.ptp(wanted))
    good = off < 1e-5 if name in CHANGED else off == 0
    print(f"{name:<20} {'ok' if good else 'DIFFERS'}: logits off by {off:.2g} of their range")
    return good


def check_vocabulary(file: Path) -> bool | None:
    """None where its rules are not known, which is said. Where the published tokenizer composes characters, llama.cpp
    does not, so texts with others are left out."""
    texts = file.with_name(f"{file.name}.inp").read_text("utf-8").removesuffix(BETWEEN).split(BETWEEN)
    lines = file.with_name(f"{file.name}.out").read_text("utf-8").splitlines()
    try:
        tokenizer = Tokenizer.from_folder(file)
    except FormatError as error:
        print(f"{file.name:<32} refused: {str(error).partition(': ')[2]:.120}")
        return None
    composes = GgufValues(file).get("tokenizer.ggml.pre") in COMPOSED
    pairs = [(text, list(map(int, line.split()))) for text, line in zip(texts, lines, strict=True)]
    kept = [pair for pair in pairs if not composes or unicodedata.is_normalized("NFC", pair[0])]
    wrong = [text for text, wanted in kept if tokenizer.encode(text) != wanted]
    print(f"{file.name:<32} {len(kept)} of {len(pairs)} texts, {len(wrong)} with other tokens {wrong[:3]!r:.200}")
    return not wrong


def main() -> int:
    llama = sources(Path(sys.argv[1]))
    vocabularies = [check_vocabulary(Path(str(file)[:-4])) for file in sorted(llama.glob("models/*.gguf.inp"))]
    good = all(each is not False for each in vocabularies)
    if sum(each is True for each in vocabularies) < LEAST_VOCABULARIES:
        print(f"expected at least {LEAST_VOCABULARIES} vocabularies whose rules are known")
        good = False
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[2:] or [name for name in FAMILIES if name not in WITHOUT_CLASS]:
            good = check_checkpoint(llama, name, Path(folder)) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
