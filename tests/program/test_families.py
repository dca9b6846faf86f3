"""Programs of every recognized family against Transformers' own forward and generate."""

from __future__ import annotations

import random

import pytest
import torch
from families import VOCAB_SIZE, build_uneven
from program.stepping import Stepper
from transformers import PreTrainedModel

from hfpaged.program.program import StepProgram

FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2", "granite",
    "gpt_neox", "starcoder2", "stablelm", "exaone4", "glm4", "cohere2", "mixtral", "qwen3_moe",
]  # fmt: skip
PROMPT_LENGTHS = (10, 3, 40)  # the windows of the tiny models are 8 tokens
NEW_TOKENS = 8


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


def all_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_and_greedy_tokens_are_those_of_the_model(family):
    model = build_uneven(family)
    stepper = Stepper(StepProgram.build(model, num_threads=1), max_requests=3)
    generated = stepper.greedy(prompts(), NEW_TOKENS, chunk=7)
    for prompt, new, request in zip(prompts(), generated, stepper.requests, strict=True):
        expected = all_logits(model, prompt + new[:-1])[-1]
        torch.testing.assert_close(request.logits[-1], expected, rtol=1e-4, atol=1e-4)
        assert new == stock_greedy(model, prompt)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_as_near_to_fp32_as_the_modules_own(family):
    reference, model = build_uneven(family), build_uneven(family, torch.bfloat16)
    reference.load_state_dict(model.state_dict())
    prompt = prompts()[-1]
    stepper = Stepper(StepProgram.build(model, num_threads=1), max_requests=1)
    stepper.prefill(stepper.add(prompt), chunk=1)
    exact, stock = (all_logits(each, prompt) for each in (reference, model))
    own_error, stock_error = (
        (logits - exact).square().mean(-1).median() for logits in (torch.stack(stepper.requests[0].logits), stock)
    )
    # The median over positions: a router's near tie may send a single token to another expert.
    assert own_error <= 1.5 * stock_error


def stock_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=None,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instruction_set_runs_the_whole_program(isa, dtype):
    model = build_uneven("qwen3_moe", dtype)
    stepper = Stepper(StepProgram.build(model, num_threads=1), max_requests=1)
    stepper.prefill(stepper.add(prompts()[0]), chunk=4)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}[dtype]
    expected = all_logits(model, prompts()[0])[-1]
    torch.testing.assert_close(stepper.requests[0].logits[-1], expected, rtol=0, atol=tolerance)
