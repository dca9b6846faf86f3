"""Perplexity of SmolLM2 in NVFP4 through the engine against the model with the dequantized weights."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hfpaged
from hfpaged.cli.main import main
from hfpaged.quantization.packed_linear import PackedLinear

TEXT = """The harbour town had been built by people who did not trust the sea. Every street that ran toward the water
ended in a wall, and every wall had a small iron door that could be shut from the inside. When the storms came in late
autumn, the bell on the customs house was rung three times, and the doors were closed one after another until the whole
town sounded like a book being shut. A prime number is a natural number greater than one that is not a product of two
smaller natural numbers. Water boils at one hundred degrees Celsius at sea level, and at a lower temperature in the
mountains, because the air presses less on it there. The first computers filled whole rooms and were programmed with
switches and cables; today a telephone computes a million times faster, and nobody remembers the switches.
"""


def dense_copy(model: PreTrainedModel, source: str) -> PreTrainedModel:
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            dense.get_submodule(name).weight.data.copy_(module.record().dequantize())
    return dense


def perplexity(model: PreTrainedModel, ids: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item())


def perplexity_on_engine(model: PreTrainedModel, ids: list[int]) -> float:
    with hfpaged.patched(model, num_blocks=64):
        engine = hfpaged.engine(model)
        handle = engine.submit(ids, max_new_tokens=1, hfpaged={"prompt_logprobs": 0})
        handle.result(timeout=300)
        assert engine.stats()["tier"] == "program"
    logprobs = [one.logprob for one in handle.prompt_logprobs[1:]]
    assert len(logprobs) == len(ids) - 1
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_perplexity_of_nvfp4_is_that_of_the_dequantized_model(smollm2_path, tmp_path, dtype):
    packed = tmp_path / "packed"
    assert main(["quantize", str(smollm2_path), str(packed), "--format", "nvfp4"]) == 0
    ids = AutoTokenizer.from_pretrained(packed)(TEXT)["input_ids"]
    model = hfpaged.from_pretrained(packed, dtype=dtype)
    expected = perplexity(dense_copy(model, str(smollm2_path)), ids)
    assert perplexity_on_engine(model, ids) == pytest.approx(expected, rel=5e-3)
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    dense_bytes = sum(2 * module.in_features * module.out_features for module in linears)
    assert len(linears) == 210
    assert sum(module.num_bytes for module in linears) <= 0.30 * dense_bytes
