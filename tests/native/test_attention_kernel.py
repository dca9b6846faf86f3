"""The attention kernel against attention by its definition, for every instruction set."""

from __future__ import annotations

import pytest
import torch
from native.paged_problem import PagedProblem, Piece, assert_matches, last_tokens, whole

from hfpaged.runtime.attention.interface import AttentionParams, LayerShape
from hfpaged.runtime.attention.native_backend import NativeBackend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [1, 15, 16, 17, 33, 300]


def problem(dtype=torch.float32, heads=4, kv_heads=2, dims=(64, 64), contexts=None, block_size=16) -> PagedProblem:
    shape = LayerShape(kv_heads, *dims)
    return PagedProblem(NativeBackend, dtype, shape, heads, contexts or MIXED, block_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_and_decodes_together(isa, dtype):
    mixed = problem(dtype, heads=9, kv_heads=3)
    assert_matches(mixed, last_tokens(mixed, [1, 1, 16, 5, 33, 40]), AttentionParams(0.125))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(192, 128), (96, 96), (80, 80), (256, 256), (16, 16), (8, 8), (10, 6), (2, 2)])
def test_head_dimensions(isa, dtype, dims):
    small = problem(dtype, dims=dims, contexts=[1, 20, 40])
    assert_matches(small, last_tokens(small, [1, 1, 30]), AttentionParams(dims[0] ** -0.5))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 13, 71])
def test_query_heads_per_kv_head(isa, group):
    grouped = problem(torch.bfloat16, heads=group, kv_heads=1, dims=(32, 32), contexts=[35])
    assert_matches(grouped, [Piece(0, 30, 35)], AttentionParams(0.2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts(isa, dtype):
    long = problem(dtype, dims=(32, 32), contexts=[3000, 2048, 2049])
    assert_matches(long, last_tokens(long, [3, 1, 2]), AttentionParams(0.3))


@pytest.mark.parametrize("window", [1, 7, 16, 100, 257, 5000])
def test_sliding_window(isa, window):
    windowed = problem(contexts=[40, 700, 2600])
    assert_matches(windowed, last_tokens(windowed, [40, 30, 2]), AttentionParams(0.125, window=window))


def test_sliding_window_reads_nothing_older(isa):
    windowed = problem(contexts=[400])
    older = windowed.tables[windowed.rows[0], : (400 - 50) // 16]
    for tensor in windowed.kv:
        tensor[older.tolist()] = float("nan")
    assert_matches(windowed, [Piece(0, 399, 400)], AttentionParams(0.125, window=50))


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(isa, dtype):
    capped = problem(dtype)
    assert_matches(capped, whole(capped), AttentionParams(1.0, softcap=3.0))


def test_softcap_of_small_scores(isa):
    capped = problem()
    assert_matches(capped, whole(capped), AttentionParams(0.01, softcap=50.0))


def test_sinks(isa):
    sunk = problem(torch.bfloat16)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0])
    assert_matches(sunk, whole(sunk), AttentionParams(0.125, window=20, sinks=sinks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [32, 64, 48])
def test_block_sizes(isa, dtype, block_size):
    blocked = problem(dtype, contexts=[1, 47, 48, 49, 200], block_size=block_size)
    assert_matches(blocked, last_tokens(blocked, [1, 47, 1, 2, 100]), AttentionParams(0.125))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(64, 64), (24, 24)])
def test_slots_beyond_the_context_may_hold_nan(isa, dtype, dims):
    stale = problem(dtype, dims=dims)  # the whole cache was NaN before the requests were written
    outputs = stale.run(whole(stale), AttentionParams(0.125))
    assert all(torch.isfinite(output).all() for output in outputs)


def test_large_scores_do_not_overflow(isa):
    steep = problem(torch.bfloat16, contexts=[100])
    assert_matches(steep, [Piece(0, 60, 100)], AttentionParams(8.0))


@pytest.mark.parametrize("bits", [0x0001, 0x03FF, 0x0400, 0x7BFF, 0x8001, 0xFBFF, 0x0000, 0x3C01])
def test_fp16_numbers_pass_unchanged(isa, bits):
    one = problem(torch.float16, contexts=[1])
    number = torch.tensor([bits], dtype=torch.uint16).view(torch.float16)
    one.backend.begin(one.batch(whole(one)))
    one.backend.write(one.kv, torch.ones_like(one.key[0]), number.expand(1, 2, 64))
    (output,) = one.run(whole(one), AttentionParams(0.125))
    assert torch.equal(output, number.expand(1, 4, 64))
