"""mlx-lm on a store of ours, on the CPU: python bench/peers/run_mlx.py STORE [--prefill 32] [--decode 8]

It puts the store's weights into mlx-lm's model, without a copy on the disk. They are in float32: in bfloat16, as they
are stored, mlx is ten times slower on a CPU. mlx uses one thread whatever there is, and is slow enough that short runs
show its speed. The program prints a JSON line. It needs mlx and mlx-lm besides moeflux (bench/peers/prepare.sh puts
them on the PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes
from to_gguf import values

from moeflux import open_store
from moeflux.stores.store import Store

# Of the names in mlx-lm's model before ours.
PREFIX = {"qwen3_5_moe": "language_model.", "deepseek_v3": ""}


def floats(bf16: np.ndarray) -> mx.array:
    return mx.array(bf16).view(mx.bfloat16).astype(mx.float32)


def named(name: str, parts: list[Any]) -> Iterator[tuple[str, mx.array]]:
    """One matrix, or one of every expert: weight, scales and biases."""

    def stack(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0] if len(arrays) == 1 else np.stack(arrays)

    yield f"{name}.weight", mx.array(stack([part.weight for part in parts]))
    yield f"{name}.scales", floats(stack([part.scales for part in parts]))
    yield f"{name}.biases", floats(stack([part.biases for part in parts]))


def weights_of(store: Store) -> Iterator[tuple[str, mx.array]]:
    matrices = {name for name, found in store.directory.formats.items() if found.is_affine}
    for name in matrices:
        yield from named(name, [store.tensor(name)])
    for name in store.directory.tensors:
        if name.rpartition(".")[0] not in matrices:
            yield name, mx.array(values(store.tensor(name)))
    for layer in store.variant.moe_layers:
        experts = [store.expert(layer, expert) for expert in range(store.variant.experts.count)]
        for part, kind in enumerate(("gate", "up", "down")):
            name = f"model.layers.{layer}.mlp.switch_mlp.{kind}_proj"
            yield from named(name, [expert[part] for expert in experts])


def load(folder: Path) -> nn.Module:
    with open_store(folder) as store:
        config = json.loads((folder / "config.json").read_text())
        if rope := config.get("rope_parameters"):  # where mlx-lm looks for it
            config |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope | {"type": rope["rope_type"]}}
        prefix = PREFIX[store.variant.model_type]
        weights = {prefix + name: array for name, array in weights_of(store)}
        formats = {prefix + name: found for name, found in store.directory.formats.items()}
        expert = store.expert(store.variant.moe_layers[0], 0)[0].format
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))

    def quantised(path: str, module: nn.Module) -> bool | dict[str, int]:
        if f"{path}.scales" not in weights:
            return False
        found = formats.get(path, expert)
        return {"group_size": found.group_size, "bits": found.bits}

    nn.quantize(model, class_predicate=quantised)
    model.load_weights(list(weights.items()))
    model.set_dtype(mx.float32)
    model.eval()
    mx.eval(model.parameters())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--prefill", type=int, default=32, metavar="N")
    parser.add_argument("--decode", type=int, default=8, metavar="N")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model = load(arguments.store)
    with open_store(arguments.store) as store:
        vocab = store.variant.vocab_size
    ids = [(7919 * i + 13) % vocab for i in range(arguments.prefill + arguments.decode)]
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([ids[:1]]), cache=make_prompt_cache(model)))  # warm
    times = [time.perf_counter()]
    mx.eval(model(mx.array([ids[: arguments.prefill]]), cache=cache)[:, -1])
    times.append(time.perf_counter())
    for token in ids[arguments.prefill :]:
        mx.eval(model(mx.array([[token]]), cache=cache))
    times.append(time.perf_counter())
    speed = {
        "prefill": arguments.prefill / (times[1] - times[0]),
        "decode": arguments.decode / (times[2] - times[1]),
    }
    print(json.dumps({"mlx": mx.__version__, **vars(arguments) | {"store": str(arguments.store)}, "speed": speed}))


if __name__ == "__main__":
    main()
