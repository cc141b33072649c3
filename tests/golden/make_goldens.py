"""Makes the golden files: what the reference implementations say about the tiny checkpoints of checkpoints.py.

    python tests/golden/make_goldens.py            writes logits.npz and tensors.json beside this script
    python tests/golden/make_goldens.py --check    makes them anew and compares with what is there (`make peers`)

Needs the packages of requirements-peers.txt in the Python that runs it. Where torch and mlx cannot live in one
environment, --hf-python and --mlx-python name two.

logits.npz, float32 [positions, vocab], for the fixed input `checkpoints.token_ids(name)`:
  NAME/hf        transformers on the checkpoint as published, float32, eager attention, one forward pass
  NAME/mlx       mlx-lm on the folder that `mlx_lm.convert -q` makes (4-bit, group 64), float32, one forward pass
tensors.json, for every folder made by mlx_lm.convert ("NAME/BITS/GROUP"): the sha256 of dtype, shape and bytes of each
tensor, and the config.json it wrote.

What each peer covers:
  transformers  every checkpoint but the fp8 one: it takes the block size from the ratio of shapes, which is wrong for a
                matrix of 160 rows in blocks of 128 (and the published models have such matrices). int4 and MXFP4 it
                gets decoded, in f32, for it needs another package or a GPU to read those; that MXFP4 was decoded as it
                would do it is checked here. Vision towers are random and see nothing.
  mlx-lm        every checkpoint but those of qwen4_exp, a family that it does not have, and qwen3_moe_coder, for it
                needs a head_dim and has no YaRN there, and of gpt_oss only gpt_oss_whole_pairs: of YaRN it knows but
                that, it has one limit and one alpha, and no plain experts as they are published. It does not read the
                sizes of gemma4_other, which are said layer by layer, and wants to be told the size of gemma4's
                vocabulary again. Of glm4_moe_lite it
                converts the tensors, but its logits are others: in latent attention's norms it takes the model's
                epsilon, as vLLM and SGLang do, where transformers, which we follow, takes DeepSeek's 1e-6. It does not
                know the model type qwen3_5_moe_text and gets that one as qwen3_5_moe, of which it reads flat configs
                too, and wants to be told in qwen3_vl_moe's text_config that the embeddings are not tied. Token by token
                it must agree with its own single pass, which for deepseek_v3 is another formula (absorbed or not): that
                is checked here and not stored.
                Of minimax_m2, qwen2_moe, mixtral and olmoe it would quantise the routers otherwise than moeflux does
                (to 4 bits, where they are no matrices of a class of their own); it is told to do the same. It leaves
                the second key-value projection of deepseek_v2 whole, where moeflux and the other conversions split it,
                so it converts none of those.
Only logits in float32 are an oracle: in bf16 either peer is off by whole units on such models.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import checkpoints

HERE = Path(__file__).resolve().parent
LOGITS, TENSORS = HERE / "logits.npz", HERE / "tensors.json"
CONVERSIONS = [(name, 4, 64) for name in checkpoints.MLX_CONVERTS]
# One model of each layout in other formats too; at group 128 some of the first one's matrices stay unquantised.
CONVERSIONS += [("qwen3_5_moe", bits, group) for bits, group in ((2, 128), (3, 64), (5, 64), (6, 64), (8, 32))]
CONVERSIONS += [("deepseek_v3", 8, 128), ("qwen3_next", 4, 128)]

# Of a model that sees: what no text needs.
VISION = ("model.visual.", "model.vision_tower.", "model.mm_projector.")

# What one machine and another may differ by, of the range of the logits.
TOLERANCE = 1e-4


# In which format mlx-lm is told to keep routers: those that choose with a bias stay as they are.
EIGHT_BITS = {"group_size": 64, "bits": 8}
ROUTERS_TOLD = {"minimax_m2": False, "qwen2_moe": EIGHT_BITS, "mixtral": EIGHT_BITS, "olmoe": EIGHT_BITS}
ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "shared_expert_gate")

# ---- Inside the peers -------------------------------------------------------------------------------------------


def run_transformers(root: Path) -> None:
    """root/NAME/hf.npy"""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    for name in checkpoints.TRANSFORMERS:
        check_mxfp4(name)
        sees = name in ("qwen3_vl_moe", "kimi_k25", "gemma4", "qwen4_exp")
        kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        model, report = kind.from_pretrained(
            root / name / "hf", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        report["missing_keys"] = [key for key in report["missing_keys"] if not (sees and key.startswith(VISION))]
        wrong = {kind: keys for kind, keys in report.items() if keys}
        assert not wrong, f"{name}: transformers does not take the checkpoint as it is: {wrong}"
        with torch.no_grad():
            logits = model(torch.tensor([checkpoints.token_ids(name)]), use_cache=False).logits[0]
        np.save(root / name / "hf.npy", logits.float().numpy())


def check_mxfp4(name: str) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, decoded = checkpoints.CHECKPOINTS[name]().tensors, checkpoints.CHECKPOINTS[name]().decoded().tensors
    for key in [key for key in tensors if key.endswith("_blocks")]:
        at = key.removesuffix("_blocks")
        parts = (torch.tensor(tensors[f"{at}_{part}"][1]) for part in ("blocks", "scales"))
        numbers = convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy()
        assert np.array_equal(numbers, decoded[at][1]), f"{name}: {at}: transformers decodes MXFP4 to other numbers"


def run_mlx(root: Path) -> None:
    """root/NAME/mlx-BITS-GROUP for every conversion, and root/NAME/mlx.npy from the 4-bit one."""
    import mlx.core as mx
    from mlx_lm.convert import convert
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    for name, bits, group in CONVERSIONS:
        folder = root / name / f"mlx-{bits}-{group}"
        told = ROUTERS_TOLD.get(name)
        predicate = (lambda path, _, told=told: told if path.endswith(ROUTERS) else True) if told is not None else None
        source = str(root / name / "hf-for-mlx")
        convert(source, folder, quantize=True, q_bits=bits, q_group_size=group, quant_predicate=predicate)
        if (bits, group) != (4, 64) or name not in checkpoints.MLX:
            continue
        model, _ = load_model(folder)
        model.set_dtype(mx.float32)
        ids = checkpoints.token_ids(name)
        logits = np.array(model(mx.array([ids]), cache=make_prompt_cache(model))[0])
        cache = make_prompt_cache(model)
        steps = np.concatenate([np.array(model(mx.array([[token]]), cache=cache)[0]) for token in ids])
        compare(f"{name}: mlx-lm token by token with its single pass", steps, logits)
        np.save(root / name / "mlx.npy", logits)


# ---- Around them ------------------------------------------------------------------------------------------------


def compare(what: str, found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    error = np.abs(found.astype(np.float64) - expected).max() / np.ptp(expected)
    print(f"{what}: largest difference {error:.1e} of the range")
    assert error <= TOLERANCE, f"{what}: differ by {error:.2e} of the range, expected at most {TOLERANCE}"


def tensor_hashes(folder: Path) -> dict[str, str]:
    """sha256 over "DTYPE SHAPE" and the bytes, for each tensor of each safetensors file."""
    hashes = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        for name, entry in sorted(header.items()):
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                label = f"{entry['dtype']} {'x'.join(map(str, entry['shape']))} ".encode()
                hashes[name] = hashlib.sha256(label + data[start + begin : start + end]).hexdigest()
    return hashes


def write_checkpoints(root: Path) -> None:
    for name in checkpoints.CHECKPOINTS:
        for_mlx = checkpoints.write(name, root / name / "hf-for-mlx")
        checkpoints.write(name, root / name / "hf", decoded=True)
        config = json.loads((for_mlx / "config.json").read_text())
        if config["model_type"] == "qwen3_5_moe_text":
            config["model_type"] = "qwen3_5_moe"
        if config["model_type"] == "qwen3_vl_moe":
            config["text_config"]["tie_word_embeddings"] = False
        if config["model_type"] == "gemma4":
            config["vocab_size"] = config["text_config"]["vocab_size"]
        (for_mlx / "config.json").write_text(json.dumps(config, indent=2))


def make(root: Path, hf_python: str, mlx_python: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    write_checkpoints(root)
    for python, peer in ((hf_python, "transformers"), (mlx_python, "mlx")):
        subprocess.run([python, __file__, "--inside", peer, str(root)], check=True)
    names = [f"{name}/hf" for name in checkpoints.TRANSFORMERS] + [f"{name}/mlx" for name in checkpoints.MLX]
    logits = {name: np.load(root / f"{name}.npy") for name in names}
    tensors = {}
    for name, bits, group in CONVERSIONS:
        folder = root / name / f"mlx-{bits}-{group}"
        config = json.loads((folder / "config.json").read_text())
        tensors[f"{name}/{bits}/{group}"] = {"config": config, "sha256": tensor_hashes(folder)}
    return logits, tensors


def check(logits: dict[str, np.ndarray], tensors: dict[str, Any]) -> None:
    with np.load(LOGITS) as committed:
        assert sorted(committed.files) == sorted(logits), f"{LOGITS.name}: expected {sorted(logits)}"
        for name in committed.files:
            compare(f"{name} with {LOGITS.name}", logits[name], committed[name])
    committed_tensors = json.loads(TENSORS.read_text())
    for name, made in tensors.items():
        assert made == committed_tensors.get(name), f"{name}: mlx_lm.convert no longer writes what {TENSORS.name} holds"
    assert committed_tensors.keys() == tensors.keys()
    print(f"{len(logits)} sets of logits and {sum(len(t['sha256']) for t in tensors.values())} tensors as committed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Golden files from transformers and mlx-lm.")
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing them")
    parser.add_argument("--hf-python", default=sys.executable, help="a Python with torch and transformers")
    parser.add_argument("--mlx-python", default=sys.executable, help="a Python with mlx and mlx-lm")
    parser.add_argument("--inside", nargs=2, metavar=("PEER", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        peer, root = arguments.inside
        {"transformers": run_transformers, "mlx": run_mlx}[peer](Path(root))
        return
    with tempfile.TemporaryDirectory() as root:
        logits, tensors = make(Path(root), arguments.hf_python, arguments.mlx_python)
    if arguments.check:
        check(logits, tensors)
        return
    np.savez_compressed(LOGITS, **logits)
    TENSORS.write_text(json.dumps(tensors, indent=1, sort_keys=True) + "\n")
    print(f"{LOGITS} {LOGITS.stat().st_size:,} bytes, {TENSORS} {TENSORS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
