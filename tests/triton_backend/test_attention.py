"""The Triton kernels in Triton's interpreter: results against attention in fp64, and whom a result depends on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native.paged_problem import PagedProblem, Piece, assert_matches, last_tokens, whole

from hfpaged.errors import ConfigError, UnsupportedModelError
from hfpaged.runtime.attention import tile_tables
from hfpaged.runtime.attention.interface import AttentionParams, LayerShape
from hfpaged.runtime.attention.tile_tables import TILE_TOKENS, divided
from hfpaged.runtime.attention.triton_backend import TritonBackend

SHAPE = LayerShape(2, 16, 8)
FP32, BF16 = torch.float32, torch.bfloat16
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
PARAMS = {
    "plain": AttentionParams(0.25),
    "window of one": AttentionParams(0.25, window=1),
    "window of a block": AttentionParams(0.25, window=16),
    "softcap and window": AttentionParams(0.5, window=5, softcap=2.0),
    "sinks": AttentionParams(0.25, sinks=SINKS),
    "sinks and window": AttentionParams(0.25, window=37, sinks=SINKS),
}


def problem(shape=SHAPE, num_heads=4, contexts=(1, 16, 50), dtype=FP32, block_size=16):
    return PagedProblem(TritonBackend, dtype, shape, num_heads, list(contexts), block_size)


def assert_all_matches(case, params, chunk):
    assert_matches(case, last_tokens(case, [1] * len(case.contexts)), params)
    assert_matches(case, last_tokens(case, chunk), params)


def test_results_in_a_step_of_all_kinds():
    # Single tokens, a chunk, a window that begins inside a block, a cap and sinks at once.
    case = problem(contexts=(1, 50))
    assert_matches(case, last_tokens(case, [1, 20]), AttentionParams(0.5, window=23, softcap=2.0, sinks=SINKS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_results(dtype, params):
    case = problem(dtype=dtype)
    assert_all_matches(case, params, [1, 3, 20])


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [2, 6, 10, 14, 40])
def test_group_sizes(num_heads):
    assert_all_matches(problem(num_heads=num_heads, contexts=(3, 20)), AttentionParams(0.25), [2, 1])


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(32, 32), (80, 80), (96, 64), (112, 112), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_head_dimensions(dims, dtype):
    assert_all_matches(problem(LayerShape(1, *dims), 2, (5, 37), dtype), AttentionParams(0.1), [2, 19])


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_block_sizes(block_size):
    assert_all_matches(problem(contexts=(4, 37), block_size=block_size), AttentionParams(0.25), [2, 19])


@pytest.mark.slow
def test_prompts_of_several_tiles():
    case = problem(LayerShape(1, 16, 16), 1, (2 * TILE_TOKENS + 3, TILE_TOKENS))
    assert_matches(case, whole(case), AttentionParams(0.25))
    assert_matches(case, [Piece(0, TILE_TOKENS - 1, 2 * TILE_TOKENS)], AttentionParams(0.25, window=20))


@pytest.mark.slow
@pytest.mark.parametrize("params", [PARAMS["plain"], PARAMS["sinks and window"]])
def test_a_single_tokens_result_depends_on_its_own_request_alone(params):
    contexts = (5, 16, 47, 200)
    together = problem(contexts=contexts)
    outputs = together.run([*last_tokens(together, [1] * 4)], params)
    mixed = together.run([Piece(0, 0, 5), *last_tokens(together, [1] * 4)[1:]], params)
    for request, output in enumerate(outputs):
        piece = Piece(request, contexts[request] - 1, contexts[request])
        assert torch.equal(output, together.run([piece], params)[0])
        if request:
            assert torch.equal(output, mixed[request])


@pytest.mark.slow
def test_any_strides_and_other_dtypes_are_converted():
    case = problem(contexts=(20,), dtype=BF16)
    expected = torch.cat(case.run(whole(case), AttentionParams(0.25)))

    def strided(states):
        return torch.cat(states).double().transpose(0, 1).contiguous().transpose(0, 1)

    case.backend.begin(case.batch(whole(case)))
    case.backend.write(case.kv, strided(case.key), strided(case.value))
    output = case.backend.run(case.kv, strided(case.query), AttentionParams(0.25, sinks=None))
    assert output.dtype is BF16 and output.is_contiguous()
    assert torch.equal(output, expected)


def test_an_empty_window_and_another_block_size_are_refused():
    case = problem(contexts=(1,))
    with pytest.raises(UnsupportedModelError, match="window of 0 tokens"):
        case.run(whole(case), AttentionParams(0.25, window=0))
    batch = case.batch(whole(case))
    batch.block_size = 32
    with pytest.raises(ConfigError, match="block size 32"):
        case.backend.begin(batch)


def test_tokens_are_divided_into_singles_and_tiles():
    counts = [1, 3, TILE_TOKENS, 1, TILE_TOKENS + 1, 2 * TILE_TOKENS]
    query_start = np.cumsum([0, *counts]).astype(np.int32)
    (singles, single_first), (tiles, tile_first) = divided(query_start)
    assert singles.tolist() == [0, 3]
    assert single_first.tolist() == query_start[[0, 3]].tolist()
    assert tiles.tolist() == [1, 2, 4, 4, 5, 5]
    offsets = tile_first - query_start[tiles]
    assert offsets.tolist() == [0, 0, 0, TILE_TOKENS, 0, TILE_TOKENS]
    assert {array.dtype for array in (singles, single_first, tiles, tile_first)} == {np.dtype(np.int32)}
    assert tile_tables.TileTableWriter.size_of_singles(problem(contexts=(17,)).batch([Piece(0, 16, 17)]), 4) == 27
