"""The FlashInfer backend over the strict stand-in: results, and the traps of the library one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native.paged_problem import PagedProblem, Piece, assert_matches, last_tokens, whole
from standin.contract import Misuse

from hfpaged.errors import ConfigError, UnsupportedModelError
from hfpaged.runtime.attention.flashinfer_backend import FlashInferBackend
from hfpaged.runtime.attention.interface import AttentionParams, LayerShape
from hfpaged.runtime.attention.page_tables import compressed

SHAPE = LayerShape(2, 16, 8)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def machine(cuda):
    return cuda


def problem(shape=SHAPE, num_heads=4, contexts=(1, 16, 50), dtype=FP32, block_size=16):
    return PagedProblem(FlashInferBackend, dtype, shape, num_heads, list(contexts), block_size)


PARAMS = {
    "plain": AttentionParams(0.25),
    "window of one": AttentionParams(0.25, window=1),
    "window": AttentionParams(0.25, window=9),
    "window of a block": AttentionParams(0.25, window=16),
    "softcap": AttentionParams(0.5, softcap=2.0),
    "softcap and window": AttentionParams(0.5, window=5, softcap=2.0),
    "sinks": AttentionParams(0.25, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    "sinks and window": AttentionParams(0.25, window=7, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
}


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_results_of_whole_prompts_chunks_and_single_tokens(dtype, params):
    case = problem(dtype=dtype)
    for counts in ([1, 3, 20], [1, 1, 1]):
        assert_matches(case, last_tokens(case, counts), params)
    assert_matches(case, whole(case), params)


@pytest.mark.parametrize("num_heads", [2, 4, 6, 8, 10, 12, 14, 16, 24, 32])
def test_every_group_size(machine, num_heads):
    case = problem(num_heads=num_heads)
    assert_matches(case, last_tokens(case, [1, 1, 1]), AttentionParams(0.25))
    group = num_heads // 2
    decode = next(one for one in machine.library.made if "Decode" in type(one).__name__)
    assert decode._tensor_cores == (group >= 4)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "kernel"),
    [(16, 8, (64, 64)), (64, 64, (64, 64)), (80, 80, (128, 128)), (96, 96, (128, 128)), (112, 112, (128, 128)),
     (128, 128, (128, 128)), (160, 160, (256, 256)), (192, 128, (192, 128)), (192, 192, (256, 256)),
     (256, 256, (256, 256))],
)  # fmt: skip
def test_head_dimensions_without_a_kernel_are_padded(machine, key_dim, value_dim, kernel):
    shape = LayerShape(1, key_dim, value_dim)
    assert FlashInferBackend.stored_shape(shape) == LayerShape(1, *kernel)
    case = problem(shape=shape, num_heads=2, contexts=(5, 20))
    for pieces in (last_tokens(case, [1, 1]), whole(case)):
        # The scale is the layer's, not that of the padded dimension.
        assert_matches(case, pieces, AttentionParams(0.2))
    assert {one._heads[2:] for one in machine.library.made} == {kernel}


def test_layers_that_differ_in_more_than_shape_have_plans_of_their_own(machine):
    case = problem()
    case.backend.begin(case.batch(whole(case)))
    query = torch.cat(case.query)
    for params in PARAMS.values():
        case.backend.run(case.kv, query, params)
    assert len(machine.library.made) == len(PARAMS)
    for params in PARAMS.values():
        assert_matches(case, whole(case), params)
    assert len(machine.library.made) == len(PARAMS)


def test_one_plan_a_step_for_all_layers_of_a_geometry(machine, monkeypatch):
    case = problem()
    plans = []
    case.backend.begin(case.batch(whole(case)))
    case.backend.run(case.kv, torch.cat(case.query), AttentionParams(0.25))
    (wrapper,) = machine.library.made
    plan = wrapper.plan
    monkeypatch.setattr(wrapper, "plan", lambda *args, **kwargs: plans.append(plan(*args, **kwargs)))
    case.backend.begin(case.batch(whole(case)))
    for _ in range(3):
        case.backend.run(case.kv, torch.cat(case.query), AttentionParams(0.25))
    assert len(plans) == 1


def test_steps_in_flight_do_not_overwrite_each_others_tables(machine):
    """Each plan waits for the copy of the one before, and no longer: the device may be a step behind."""
    case = problem()
    steps = (whole(case), last_tokens(case, [1, 1, 1]))
    outputs = []
    for pieces in steps * 5:
        case.backend.begin(case.batch(pieces))
        query = torch.cat([case.query[piece.request][piece.first : piece.end] for piece in pieces])
        outputs.append(case.backend.run(case.kv, query, AttentionParams(0.25)))
    for index, output in enumerate(outputs):
        assert torch.equal(output, outputs[index % 2])


def test_sinks_with_a_softcap_are_refused_by_name():
    case = problem()
    case.backend.begin(case.batch(whole(case)))
    with pytest.raises(UnsupportedModelError, match="attention sinks with a soft cap"):
        case.backend.run(case.kv, torch.cat(case.query), AttentionParams(0.25, softcap=1.0, sinks=torch.zeros(4)))


def test_tables_of_any_request_order_and_length():
    case = problem(contexts=(1, 15, 16, 17, 32, 33, 64))
    page_start, last_page_len, pages = compressed(case.batch(whole(case)))
    assert page_start.tolist() == [0, 1, 2, 3, 5, 7, 10, 14]
    assert last_page_len.tolist() == [1, 15, 16, 1, 16, 1, 16]
    want = [case.tables[case.rows[i], : -(-context // 16)] for i, context in enumerate(case.contexts)]
    assert np.array_equal(pages, np.concatenate(want))
    assert {array.dtype for array in (page_start, last_page_len, pages)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_any_page_size(block_size):
    case = problem(block_size=block_size)
    assert_matches(case, last_tokens(case, [1, 3, 20]), AttentionParams(0.25))
    assert_matches(case, last_tokens(case, [1, 1, 1]), AttentionParams(0.25))


def test_block_size_of_batch_and_cache_must_agree():
    case = problem()
    batch = case.batch([Piece(0, 0, 1)])
    batch.block_size = 32
    with pytest.raises(ConfigError, match="block size 32"):
        case.backend.begin(batch)


def test_any_strides_and_other_dtypes_are_converted():
    case = problem(dtype=BF16)
    expected = torch.cat(case.run(whole(case), AttentionParams(0.25)))

    def strided(states):
        return torch.cat(states).double().transpose(0, 1).contiguous().transpose(0, 1)

    case.backend.begin(case.batch(whole(case)))
    case.backend.write(case.kv, strided(case.key), strided(case.value))
    output = case.backend.run(case.kv, strided(case.query), AttentionParams(0.25))
    assert output.dtype is BF16 and output.is_contiguous()
    assert torch.equal(output, expected)


def test_the_stand_in_refuses_what_the_library_gets_wrong(machine):
    """It would not be worth much if it did not."""
    device, library = machine
    workspace = torch.empty(1 << 20, dtype=torch.uint8)
    host = device.pinned(8, torch.int32)
    start, last = host[:2].copy_(torch.tensor([0, 1])), host[2:3].fill_(3)
    pages = device.on_device.add(torch.zeros(1, dtype=torch.int32))
    heads = {"num_qo_heads": 2, "num_kv_heads": 2, "page_size": 16, "head_dim": 64}
    fp32 = {"q_data_type": FP32, "kv_data_type": FP32}

    def plan(start=start, pages=pages, last=last, options=fp32, **changes):
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace)
        wrapper.plan(start, pages, last, **{**heads, **changes}, **options)
        return wrapper

    cache = tuple(torch.zeros(1, 16, 2, 64) for _ in range(2))
    assert plan().run(torch.zeros(1, 2, 64), cache).shape == (1, 2, 64)
    for error, attempt in {
        "q_data_type is float16": lambda: plan(options={}),
        "int64": lambda: plan(pages=pages.long()),
        "not on the device": lambda: plan(pages=start),
        "would wait": lambda: plan(start=device.on_device.add(start.clone())),
        "last_page_len": lambda: plan(last=host[3:4].fill_(17)),
        "no kernel": lambda: plan(head_dim=80),
        "Unsupported group_size": lambda: plan(num_qo_heads=10),
        "run.. before plan": lambda: library.BatchDecodeWithPagedKVCacheWrapper(workspace).run(None, cache),
        "dtypes differ": lambda: plan().run(torch.zeros(1, 2, 64, dtype=BF16), cache),
        "queries are": lambda: plan().run(torch.zeros(2, 2, 64), cache),
        "out of range": lambda: plan(pages=device.on_device.add(pages + 1)).run(torch.zeros(1, 2, 64), cache),
        "ignores sinks": lambda: plan().run(torch.zeros(1, 2, 64), cache, sinks=torch.zeros(2)),
    }.items():
        with pytest.raises(Misuse, match=error):
            attempt()
    wrapper = plan()
    with pytest.raises(Misuse, match="still being copied"):
        wrapper.plan(start, pages, last, **heads, **fp32)
