"""The model is the one that transformers has under this name: logits, gradients, names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from tools.train.config import Shape
from tools.train.export import hugging_face_config, read_folder, write_folder
from tools.train.model import Model, prediction_loss
from tools.train.tests.tiny import SHAPE

VOCABULARY = 200


def lively(shape: Shape) -> Model:
    """Weights larger than at the start of a training, so that every part shows in the result."""
    torch.manual_seed(1)
    model = Model(shape, VOCABULARY)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif weight.dim() >= 2 and "conv1d" not in name:
                weight.mul_(4)
    return model


def reference(model: Model) -> torch.nn.Module:
    values = hugging_face_config(model.shape, VOCABULARY, [1])
    values = {name: value for name, value in values.items() if name not in ("architectures", "model_type", "dtype")}
    other = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**values)).eval()
    missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    other.tie_weights()
    return other


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients(tied: bool) -> None:
    model = lively(replace(SHAPE, tie_word_embeddings=tied))
    other = reference(model)
    tokens = torch.randint(0, VOCABULARY, (2, 151), generator=torch.Generator().manual_seed(2))
    logits, _ = model(tokens[:, :-1])
    wanted = other(tokens[:, :-1]).logits
    assert wanted.std() > 0.05
    assert (logits - wanted).norm() <= 1e-4 * wanted.norm()
    for each in (logits, wanted):
        prediction_loss(each, tokens[:, 1:]).backward()
    theirs = dict(other.named_parameters())
    for name, weight in model.named_parameters():
        assert weight.grad.norm() > 0, name
        assert (weight.grad - theirs[name].grad).norm() <= 1e-3 * theirs[name].grad.norm(), name


def test_an_exported_folder_is_read(work, tmp_path) -> None:
    model = lively(SHAPE)
    write_folder(model.state_dict(), SHAPE, [1], work / "tokenizer", tmp_path)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.arange(90)[None]
    with torch.no_grad():
        wanted, _ = read_folder(tmp_path)(tokens)
        logits = found(tokens).logits
    assert (logits - wanted).norm() <= 1e-4 * wanted.norm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    said = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
