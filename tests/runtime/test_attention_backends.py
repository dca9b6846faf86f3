"""What every attention backend promises: the results, and the handling of tensors around them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from native.paged_problem import CPU, PagedProblem, Piece, assert_matches, last_tokens, whole
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from hfpaged.errors import ConfigError
from hfpaged.runtime.attention.interface import AttentionParams, LayerShape
from hfpaged.runtime.attention.native_backend import NativeBackend
from hfpaged.runtime.attention.torch_backend import TorchBackend, attend

SHAPE = LayerShape(2, 16, 8)


@pytest.fixture(params=[TorchBackend, NativeBackend], ids=lambda backend: backend.name)
def backend_class(request):
    reason = request.param.unavailable(CPU, torch.float32, [SHAPE], 16)
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.25),
        AttentionParams(0.25, window=9),
        AttentionParams(0.5, softcap=2.0),
        AttentionParams(0.25, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    ],
)
def test_results(backend_class, dtype, params):
    problem = PagedProblem(backend_class, dtype, SHAPE, 4, [1, 16, 50])
    assert_matches(problem, last_tokens(problem, [1, 3, 20]), params)


def test_sinks_in_the_dtype_of_the_model(backend_class):
    problem = PagedProblem(backend_class, torch.bfloat16, SHAPE, 4, [5])
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.bfloat16)
    assert_matches(problem, whole(problem), AttentionParams(0.25, sinks=sinks.float()))
    in_fp32 = problem.run(whole(problem), AttentionParams(0.25, sinks=sinks.float()))
    assert torch.equal(problem.run(whole(problem), AttentionParams(0.25, sinks=sinks))[0], in_fp32[0])


def test_any_strides(backend_class):
    # Transformers hands over [heads, tokens, dim] transposed.
    problem = PagedProblem(backend_class, torch.float32, SHAPE, 4, [20])
    (straight,) = problem.run(whole(problem), AttentionParams(0.25))

    def strided(states: torch.Tensor) -> torch.Tensor:
        return states.transpose(0, 1).contiguous().transpose(0, 1)

    for tensor in problem.kv:
        tensor.zero_()
    every_other = torch.stack([problem.value[0], problem.value[0]], dim=-1)[..., 0]
    problem.backend.write(problem.kv, strided(problem.key[0]), every_other)
    output = problem.backend.run(problem.kv, strided(problem.query[0]), AttentionParams(0.25))
    assert torch.equal(output, straight)
    assert output.is_contiguous()


def test_other_dtypes_are_converted(backend_class):
    problem = PagedProblem(backend_class, torch.bfloat16, SHAPE, 4, [20])
    (expected,) = problem.run(whole(problem), AttentionParams(0.25))
    problem.backend.write(problem.kv, problem.key[0].float(), problem.value[0].double())
    output = problem.backend.run(problem.kv, problem.query[0].float(), AttentionParams(0.25))
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)


def test_layers_keep_their_own_keys_and_values(backend_class):
    problem = PagedProblem(backend_class, torch.float32, SHAPE, 4, [20])
    (first,) = problem.run(whole(problem), AttentionParams(0.25))
    other = problem.backend.allocate(LayerShape(1, 32, 24), problem.num_blocks)
    problem.backend.write(other, torch.ones(20, 1, 32), torch.full((20, 1, 24), 3.0))
    second = problem.backend.run(other, torch.ones(20, 6, 32), AttentionParams(0.1, window=2))
    torch.testing.assert_close(second, torch.full((20, 6, 24), 3.0))
    assert torch.equal(problem.run(whole(problem), AttentionParams(0.25))[0], first)


def test_allocation_is_zeroed_and_outlives_inference_mode(backend_class):
    backend = backend_class(CPU, torch.bfloat16, 16)
    with torch.inference_mode():
        tensors = backend.allocate(SHAPE, 3)
    for tensor in tensors:
        assert tensor.shape[0] == 3
        assert not tensor.is_inference()
        assert not tensor.any()
    assert sum(tensor.numel() for tensor in tensors) == 3 * 16 * 2 * (16 + 8)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_untouched_pool_takes_no_memory(backend_class):
    def resident_pages() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    before = resident_pages()
    pool = backend_class(CPU, torch.float32, 16).allocate(LayerShape(8, 128, 128), 8192)  # 1 GiB
    assert pool[0].nbytes == 1 << 29
    assert resident_pages() - before < 8192  # 32 MiB


def test_block_size_of_batch_and_cache_must_agree(backend_class):
    problem = PagedProblem(backend_class, torch.float32, SHAPE, 4, [20], block_size=32)
    batch = problem.batch([Piece(0, 0, 20)])
    batch.block_size = 16
    with pytest.raises(ConfigError, match="block size 16"):
        problem.backend.begin(batch)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_torch_backend_takes_any_block_size(block_size):
    problem = PagedProblem(TorchBackend, torch.float32, SHAPE, 4, [1, 5, 23], block_size)
    assert_matches(problem, last_tokens(problem, [1, 2, 9]), AttentionParams(0.25))


def stock(attention, query, key, value, window=None, scaling=0.25, **options):
    """Output of a model's own eager attention function for the last tokens of one request."""
    length, tokens = key.shape[0], query.shape[0]
    ages = torch.arange(length - tokens, length)[:, None] - torch.arange(length)[None]
    visible = (ages >= 0) & (ages < (window or length))
    mask = torch.zeros(tokens, length).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False)
    module.sinks = options.pop("sinks", None)
    states = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    return attention(module, *states, mask, scaling=scaling, **options)[0][0]


@pytest.fixture
def states():
    torch.manual_seed(0)
    return torch.randn(7, 4, 16), torch.randn(30, 2, 16), torch.randn(30, 2, 16)


def test_torch_attention_equals_stock_with_softcap_and_window(states):
    expected = stock(modeling_gemma2.eager_attention_forward, *states, window=10, softcap=2.0)
    torch.testing.assert_close(attend(*states, AttentionParams(0.25, window=10, softcap=2.0)), expected)


def test_torch_attention_equals_stock_with_sinks(states):
    sinks = torch.tensor([0.0, 1.0, -1.0, 2.0])
    expected = stock(modeling_gpt_oss.eager_attention_forward, *states, sinks=sinks)
    torch.testing.assert_close(attend(*states, AttentionParams(0.25, sinks=sinks)), expected)
