"""What transformers says about the built-in model: python tests/golden/make_builtin.py [--check]

builtin.npz, for each prompt of `PROMPTS`: NAME/prompt and NAME/answer, token ids, the answer chosen greedily;
NAME/positions and NAME/logits, float32, of a few positions of prompt and answer together. In float32 on exactly the
numbers that the store's codes stand for. With --check they are computed anew and compared (`make peers`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

from moeflux import _core, builtin, open_store
from moeflux.stores.floats import decode
from moeflux.stores.store import Store

GOLDEN = Path(__file__).with_name("builtin.npz")
TOLERANCE = 1e-4  # of the range of the logits: what one machine and another may differ by
ANSWER = 48  # tokens at most

PROMPTS = {
    "story": "Once upon a time, there was a little fox who",
    "chat": "<|im_start|>user\nTell me a story about a rabbit named Daisy.<|im_end|>\n<|im_start|>assistant\n",
    "fact": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
}


def numbers(stored: object, columns: int) -> torch.Tensor:
    """A stored tensor as the float32 numbers it stands for."""
    if stored.format.is_affine:
        values = _core.dequantize(stored.weight, stored.scales, stored.biases, stored.format, columns)
    else:
        raw = np.ascontiguousarray(stored.weight)
        values = decode(raw.reshape(-1).view(np.uint8), stored.format.element).reshape(raw.shape)
    return torch.from_numpy(np.array(values))


def published(store: Store, empty: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The store's numbers under the names of transformers; `empty` says which, and their shapes."""
    state = {}
    for name, wanted in empty.items():
        if name == "lm_head.weight":
            continue  # tied to the embedding
        if ".experts." in name:
            layer = int(name.split(".")[2])
            each = [store.expert(layer, expert) for expert in range(store.variant.experts.count)]
            parts = (0, 1) if name.endswith("gate_up_proj") else (2,)
            matrices = [torch.cat([numbers(expert[part], wanted.shape[-1]) for part in parts]) for expert in each]
            state[name] = torch.stack(matrices)
            continue
        owner = name.removesuffix(".weight")
        stored = store.tensor(owner if owner in store.directory.formats else name)
        values = numbers(stored, wanted.shape[-1]).reshape(wanted.shape)
        folded = "norm" in name and "linear_attn" not in name  # transformers adds the 1 itself
        state[name] = values - 1 if folded else values
    return state


def reference(store: Store) -> torch.nn.Module:
    config = json.loads((store.path / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    kind = transformers.Qwen3_5MoeTextConfig(**config)
    model = transformers.Qwen3_5MoeForCausalLM(kind).float().eval()
    missing, unexpected = model.load_state_dict(published(store, model.state_dict()), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model


@torch.no_grad()
def compute() -> dict[str, np.ndarray]:
    with open_store(builtin.path()) as store:
        model, ends = reference(store), store.variant.eos_ids
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(builtin.path())
    found = {}
    for name, text in PROMPTS.items():
        prompt = tokenizer(text)["input_ids"]
        ids = list(prompt)
        while len(ids) < len(prompt) + ANSWER and (len(ids) == len(prompt) or ids[-1] not in ends):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logits = model(torch.tensor([ids])).logits[0].numpy()
        positions = np.unique(np.linspace(0, len(ids) - 1, 5).astype(np.int32))
        found |= {f"{name}/prompt": np.int32(prompt), f"{name}/answer": np.int32(ids[len(prompt) :])}
        found |= {f"{name}/positions": positions, f"{name}/logits": logits[positions]}
        print(repr(tokenizer.decode(ids)), flush=True)
    return found


def main(check: bool) -> int:
    found = compute()
    if not check:
        np.savez_compressed(GOLDEN, **found)
        return 0
    with np.load(GOLDEN) as golden:
        stored = dict(golden)
    wrong = sorted(stored.keys() ^ found.keys())
    for name in sorted(stored.keys() & found.keys()):
        if name.endswith("/logits"):
            equal = np.abs(stored[name] - found[name]).max() <= TOLERANCE * np.ptp(stored[name])
        else:
            equal = np.array_equal(stored[name], found[name])
        wrong += [] if equal else [name]
    print("\n".join(f"{name}: not as stored" for name in wrong) or "builtin.npz: as stored")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
