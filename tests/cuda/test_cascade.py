"""Shared prefixes read once: the grouping, the results of two merged parts, and when it is done."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import random_prompts
from families import build_tiny
from generation.test_parity import Case, counters
from native.paged_problem import PagedProblem, assert_matches, last_tokens, share_first_blocks

import hfpaged
from hfpaged.runtime.attention import flashinfer_cascade
from hfpaged.runtime.attention.flashinfer_backend import FlashInferBackend
from hfpaged.runtime.attention.flashinfer_cascade import can_divide
from hfpaged.runtime.attention.flashinfer_wrappers import Geometry
from hfpaged.runtime.attention.interface import AttentionParams, LayerShape
from hfpaged.runtime.attention.shared_prefixes import find_shared_prefixes

SHAPE = LayerShape(2, 64, 64)


@pytest.fixture(autouse=True)
def machine(cuda, monkeypatch):
    monkeypatch.setattr(flashinfer_cascade, "LEAST_SAVED_BYTES", 1)
    return cuda


def batch_of(tables, contexts, block_size=4):
    rows = np.full((len(tables), max(map(len, tables))), 99, dtype=np.int32)
    for row, table in zip(rows, tables, strict=True):
        row[: len(table)] = table
    return SimpleNamespace(
        block_tables=rows,
        table_rows=np.arange(len(tables), dtype=np.int32),
        context_len=np.array(contexts, dtype=np.int32),
        query_start=np.arange(len(tables) + 1, dtype=np.int32),
        block_size=block_size,
    )


@pytest.mark.parametrize(
    ("tables", "contexts", "start", "blocks", "saved"),
    [
        ([[1, 2, 3], [1, 2, 4]], [9, 10], [0, 2], [2], 2),
        # The last block is a request's own, also when it is full.
        ([[1, 2], [1, 2]], [8, 8], [0, 2], [1], 1),
        ([[1, 2, 3], [1, 2, 4], [7, 8, 9], [7, 8, 10]], [9] * 4, [0, 2, 4], [2, 2], 4),
        # One that shares much less begins another group; one alone is a group with its own first block.
        ([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 8, 9]], [21, 21, 9], [0, 2, 3], [5, 1], 5),
        ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]], [13, 13, 13], [0, 3], [2], 4),
    ],
)
def test_groups(tables, contexts, start, blocks, saved):
    found = find_shared_prefixes(batch_of(tables, contexts))
    assert (found.start.tolist(), found.blocks.tolist(), found.saved_blocks()) == (start, blocks, saved)


@pytest.mark.parametrize(
    ("tables", "contexts"),
    [([[1, 2]], [8]), ([[1, 2], [3, 4]], [8, 8]), ([[1, 2], [1, 2], [5]], [8, 8, 4])],
)
def test_nothing_to_share(tables, contexts):
    assert find_shared_prefixes(batch_of(tables, contexts)) is None


def test_a_request_with_one_block_keeps_the_step_whole(machine):
    case = shared_problem([40, 70, 16])
    case.run(last_tokens(case, [1, 1, 1]), AttentionParams(0.125))
    assert_matches(case, last_tokens(case, [1, 1, 1]), AttentionParams(0.125))
    assert case.backend.shared_prefix_steps == 0


def shared_problem(contexts, dtype=torch.float32):
    case = PagedProblem(FlashInferBackend, dtype, SHAPE, 4, contexts)
    share_first_blocks(case)
    return case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [AttentionParams(0.125), AttentionParams(0.125, softcap=2.0)])
def test_results(dtype, params):
    case = shared_problem([50, 70, 33, 100, 49], dtype)
    pieces = last_tokens(case, [1] * 5)
    assert_matches(case, pieces, params)
    assert case.backend.shared_prefix_steps == 0
    for steps in (1, 2, 3):
        assert_matches(case, pieces, params)
        assert case.backend.shared_prefix_steps == steps


@pytest.mark.parametrize("params", [AttentionParams(0.125, window=40), AttentionParams(0.125, sinks=torch.zeros(4))])
def test_layers_that_cannot_be_divided_are_not(machine, params):
    case = shared_problem([50, 70])
    pieces = last_tokens(case, [1, 1])
    case.run(pieces, AttentionParams(0.125))
    made = len(machine.library.made)
    # Another layer makes this a divided step.
    assert_matches(case, pieces, params)
    assert case.backend.shared_prefix_steps == 1
    assert len(machine.library.made) == made + 1


@pytest.mark.parametrize(("dims", "holds"), [((64, 64), True), ((256, 256), True), ((192, 128), False)])
def test_head_dimensions_that_can_be_merged(dims, holds):
    assert can_divide(Geometry(8, 2, *dims, 0.1, None, None, False)) is holds


def test_steps_with_more_tokens_of_a_request_are_whole():
    case = shared_problem([50, 70])
    case.run(last_tokens(case, [1, 1]), AttentionParams(0.125))
    assert_matches(case, last_tokens(case, [1, 2]), AttentionParams(0.125))
    assert case.backend.shared_prefix_steps == 0


def test_little_to_save_is_not_worth_it(monkeypatch):
    case = shared_problem([50, 70])
    pieces = last_tokens(case, [1, 1])
    case.run(pieces, AttentionParams(0.125))
    # Three blocks of 16 tokens of one layer: 2 heads, keys and values, 64 numbers, fp32.
    saved = 3 * 16 * 2 * 2 * 64 * 4
    for least, steps in ((saved + 1, 0), (saved, 1)):
        monkeypatch.setattr(flashinfer_cascade, "LEAST_SAVED_BYTES", least)
        case.run(pieces, AttentionParams(0.125))
        assert case.backend.shared_prefix_steps == steps


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_text_is_stocks(family, stock_greedy):
    model = build_tiny(family, head_dim=64, num_hidden_layers=2)
    prompts = random_prompts((35, 40, 50), common_prefix=34)
    case = Case(model, prompts, [stock_greedy(model, prompt, 6) for prompt in prompts], 6)
    with hfpaged.patched(model):
        case.check(case.generate_batch())
        case.check(case.generate_batch())
        assert counters(case)["shared_prefix_steps"] > 0
        hfpaged.engine(model).release()
        assert counters(case)["shared_prefix_steps"] > 0
