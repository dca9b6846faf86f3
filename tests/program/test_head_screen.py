"""Steps that want no logits but the largest rule most columns of the head out, and find the same token."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from families import build_tiny
from program.stepping import Stepper
from torch import nn
from transformers import PreTrainedModel

from hfpaged.program.description import LogitScaling
from hfpaged.program.head_screen import can_screen
from hfpaged.program.program import StepProgram

VOCAB = 1000  # no whole number of panels
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def model_with_head(weight: torch.Tensor, bias: torch.Tensor | None = None, family: str = "llama") -> PreTrainedModel:
    """A tiny model with another head, in the dtype of its weight."""
    model = build_tiny(family)
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    head.weight = nn.Parameter(weight.float())
    if bias is not None:
        head.bias = nn.Parameter(bias.float())
    model.set_output_embeddings(head)
    model.config.vocab_size = len(weight)
    return model.to(weight.dtype)


def head_of_near_ties(dtype: torch.dtype, width: int) -> torch.Tensor:
    """Rows of which many differ in their last bits only, or not at all."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, width, generator=generator).repeat(VOCAB // 40, 1)
    return (rows * (1 + 2e-3 * torch.randn(VOCAB, width, generator=generator).round())).to(dtype)


def hidden_size(family: str = "llama") -> int:
    return build_tiny(family).config.hidden_size


def both_ways(program: StepProgram, rows: int, seed: int) -> tuple[list[int], list[int]]:
    """The tokens of a step of `rows` rows without and with all logits."""
    stepper = Stepper(program, max_requests=16)
    prompts = np.random.default_rng(seed).integers(1, 100, size=(rows, 3)).tolist()
    batch = stepper.batch([(stepper.add(prompt), 3) for prompt in prompts])
    last = batch.query_start[1:].astype(np.int64) - 1
    screened, _ = program.run(batch, stepper.kv, last)
    exact, logits = program.run(batch, stepper.kv, last, want_logits=True)
    if torch.isfinite(logits).all():
        assert exact.tolist() == logits.argmax(-1).tolist()
    return screened.tolist(), exact.tolist()


def assert_same_tokens(program: StepProgram) -> None:
    for seed in range(3):
        for rows in (1, 4, 5, 16):
            screened, exact = both_ways(program, rows, seed)
            assert screened == exact


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_near_ties_are_decided_by_the_exact_product(isa, dtype):
    model = model_with_head(head_of_near_ties(dtype, hidden_size()))
    assert_same_tokens(StepProgram.build(model, num_threads=2, min_thread_seconds=0))


@pytest.mark.parametrize("family", ["llama", "granite", "cohere2", "gemma2"])
def test_bias_and_scaling_of_the_logits_count(family):
    bias = 0.1 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) if family == "llama" else None
    model = model_with_head(head_of_near_ties(torch.bfloat16, hidden_size(family)), bias, family)
    assert_same_tokens(StepProgram.build(model, num_threads=2, min_thread_seconds=0))


def test_the_exact_weights_of_most_columns_are_not_read(isa):
    weight = 0.01 * torch.randn(VOCAB, hidden_size(), generator=torch.Generator().manual_seed(2))
    weight[70], weight[71] = 1.0, -1.0  # one of them has the largest logit, unless x is all but orthogonal
    program = StepProgram.build(model_with_head(weight.bfloat16()), num_threads=1)
    head = program.packed_matrices[-1].weight
    before = both_ways(program, 1, seed=0)[0]
    assert before[0] in (70, 71)
    # From here on everything behind the second panel would win.
    panel_bytes = head.depth * 256
    ctypes.memset(head.panels + 2 * panel_bytes, 0x45, (head.columns // 64 - 2) * panel_bytes)
    screened, exact = both_ways(program, 1, seed=0)
    assert screened == before
    assert exact[0] >= 128


@pytest.mark.parametrize("outliers", [1, 3, 40])
def test_rows_with_numbers_far_larger_than_the_others(isa, outliers):
    model = model_with_head(head_of_near_ties(torch.bfloat16, hidden_size()))
    with torch.no_grad():
        model.model.norm.weight[:outliers] *= torch.logspace(1, 3, outliers)
    assert_same_tokens(StepProgram.build(model, num_threads=2, min_thread_seconds=0))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e38])
def test_columns_without_bounds_are_multiplied(value):
    weight = torch.randn(VOCAB, hidden_size(), generator=torch.Generator().manual_seed(3))
    program = StepProgram.build(model_with_head(weight), num_threads=1)
    with torch.no_grad():
        head = program.description.head.module
        head.weight[500, 7] = value
    program.repack()
    assert_same_tokens(program)


def test_rows_that_are_no_numbers_come_out_as_without_the_screen():
    program = StepProgram.build(model_with_head(torch.randn(VOCAB, hidden_size())), num_threads=2, min_thread_seconds=0)
    with torch.no_grad():
        program.description.final_norm.module.weight[3] = float("nan")
    program.repack()
    assert both_ways(program, 2, seed=0) == ([0, 0], [0, 0])


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_row_without_bounds_leaves_the_others_theirs(value):
    model = model_with_head(head_of_near_ties(torch.float32, hidden_size()))
    program = StepProgram.build(model, num_threads=2, min_thread_seconds=0)
    stepper = Stepper(program, max_requests=8)
    prompts = [[token, token, token] for token in range(1, 9)]
    batch = stepper.batch([(stepper.add(prompt), 3) for prompt in prompts])
    last = batch.query_start[1:].astype(np.int64) - 1
    expected, _ = program.run(batch, stepper.kv, last, want_logits=True)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = value
    got, _ = program.run(batch, stepper.kv, last)
    assert got[[0, 1, 2, 3, 5, 6, 7]].tolist() == expected[[0, 1, 2, 3, 5, 6, 7]].tolist()
    assert got[4] == 0  # all of its logits are the same, or none is a number


def test_the_screen_follows_the_weights():
    weight = torch.randn(VOCAB, hidden_size())
    program = StepProgram.build(model_with_head(weight), num_threads=1)
    with torch.no_grad():
        program.description.head.module.weight.copy_(weight.flip(0))
    program.repack([program.description.head.module])
    assert_same_tokens(program)


def test_only_what_keeps_the_order_of_logits_is_screened():
    assert can_screen(LogitScaling(), 576)
    assert can_screen(LogitScaling(multiplier=0.1, divisor=8.0), 576)
    assert not can_screen(LogitScaling(softcap=30.0), 576)
    assert not can_screen(LogitScaling(multiplier=-1.0), 576)
    assert not can_screen(LogitScaling(), 1 << 17)
