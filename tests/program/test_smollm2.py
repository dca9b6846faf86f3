"""The program on real weights: SmolLM2-135M against Transformers, over a thousand tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from program.stepping import Stepper
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hfpaged.program.program import StepProgram

PROMPTS = [
    "Tell me a story about a fox and a river.",
    "Explain how photosynthesis works.",
    "Write a short essay on the history of computers.",
    "What is the capital of France and why?",
    "def quicksort(a):\n",
    "The quick brown fox",
]
NEW_TOKENS = 170


def program_logits(program: StepProgram, tokens: list[int], first: int) -> torch.Tensor:
    """Logits of the positions from `first` on, all in one step."""
    stepper = Stepper(program, max_requests=1, max_blocks=16)
    batch = stepper.batch([(stepper.add(tokens), len(tokens))])
    rows = np.arange(first, len(tokens))
    argmax, logits = program.run(batch, stepper.kv, rows, want_logits=True)
    assert np.array_equal(argmax, logits.argmax(-1).numpy())
    return logits


def model_logits(model: PreTrainedModel, tokens: list[int], first: int) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, first:].float()


@pytest.mark.slow
def test_choices_differ_from_fp32_no_more_often_than_those_of_the_modules(smollm2_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    exact, half = (
        AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    exact_program, half_program = (StepProgram.build(model, num_threads=2) for model in (exact, half))
    stock_differs = program_differs = total = 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        new = Stepper(exact_program, max_requests=1, max_blocks=16).greedy([ids], NEW_TOKENS)[0]
        tokens, first = ids + new[:-1], len(ids) - 1
        choice = model_logits(exact, tokens, first).argmax(-1)
        assert choice.tolist() == new
        stock_differs += int((model_logits(half, tokens, first).argmax(-1) != choice).sum())
        program_differs += int((program_logits(half_program, tokens, first).argmax(-1) != choice).sum())
        total += len(new)
    assert total > 1000
    assert program_differs <= stock_differs + 2 * stock_differs**0.5 + 1
