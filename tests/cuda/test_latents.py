"""Multi-head latent attention over the stand-in: the cache holds latents, and text is stock's."""

from __future__ import annotations

import pytest
import torch
from batches import random_prompts
from families import build_tiny
from generation.test_parity import Case, counters
from internals import workspace_of
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import hfpaged
from hfpaged.runtime.attention.flashinfer_latent import can_attend
from hfpaged.runtime.attention.interface import LatentShape
from hfpaged.runtime.latent import latent_heads

pytestmark = [
    pytest.mark.usefixtures("cuda"),
    pytest.mark.skipif(
        not hasattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv"),
        reason="Transformers before 5.24 has no latents to keep",
    ),
]
# The only sizes that FlashInfer's kernel is made for; and no experts, which cannot be captured.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
FIELDS = {**LATENT, "num_hidden_layers": 2, "first_k_dense_replace": 2}
NEW = 8


@pytest.fixture(scope="module")
def model():
    return build_tiny("deepseek_v3", **FIELDS)


def cache_shapes(model):
    layers = workspace_of(hfpaged.engine(model)).cache.layers
    return {(tuple(layer.key.shape[2:]), tuple(layer.value.shape[2:])) for layer in layers}


@pytest.mark.parametrize("chunk", [16, pytest.param(512, marks=pytest.mark.slow)])
def test_text_is_stocks_and_the_cache_holds_latents(model, cuda, stock_greedy, chunk):
    prompts = random_prompts((3, 16, 33), common_prefix=16)
    case = Case(model, prompts, [stock_greedy(model, prompt, NEW) for prompt in prompts], NEW)
    with hfpaged.patched(model, max_batch_tokens=chunk):
        case.check(case.generate_batch())
        case.check(case.generate_batch())
        counted = counters(case)
        assert cache_shapes(model) == {((1, 64), (1, 512))}
    assert (counted["backend"], counted["fallbacks"]) == ("flashinfer", {})
    assert counted["steps_ahead"] > 0
    assert counted["captured_steps"] > 0, counted["capture_problem"]
    assert any("MLA" in type(one).__name__ and one._buffers for one in cuda.library.made)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_preempted_text_is_stocks(stock_greedy, kind):
    model = build_tiny("deepseek_v3", **FIELDS, q_lora_rank=None, rope_interleave=False)
    prompts = random_prompts((20, 33, 47), common_prefix=16)
    case = Case(model, prompts, [stock_greedy(model, prompt, 24) for prompt in prompts], 24)
    with hfpaged.patched(model, num_blocks=7, preemption=kind):
        case.check(case.generate_batch())
        assert counters(case)[f"preemptions_{kind}"] > 0
        assert cache_shapes(model) == {((1, 64), (1, 512))}


@pytest.mark.slow
def test_other_weights_are_seen(model, stock_greedy):
    other = build_tiny("deepseek_v3", seed=1, **FIELDS)
    prompts = random_prompts((9,))
    with hfpaged.patched(other):
        before = Case(other, prompts, [[]], NEW).generate_batch()
        other.load_state_dict(model.state_dict())
        after = Case(other, prompts, [[]], NEW).generate_batch()
    assert before != after
    Case(model, prompts, [stock_greedy(model, prompts[0], NEW)], NEW).check(after)


@pytest.mark.slow
def test_what_has_no_kernel_is_expanded(stock_greedy):
    model = build_tiny("deepseek_v3", num_hidden_layers=2)
    prompts = random_prompts((9,))
    case = Case(model, prompts, [stock_greedy(model, prompts[0], NEW)], NEW)
    with hfpaged.patched(model):
        case.check(case.generate_batch())
        assert cache_shapes(model) == {((4, 64), (4, 64))}, cache_shapes(model)


@pytest.mark.parametrize(("heads", "holds"), [(1, True), (16, True), (128, True), (20, False), (256, False)])
def test_numbers_of_heads_whose_tiles_end_between_tokens(heads, holds):
    assert can_attend(LatentShape(1, 576, 512), heads) is holds


def test_an_expansion_that_is_not_the_plain_one_is_left_alone(model):
    module = model.model.layers[0].self_attn
    assert latent_heads(module).shape == LatentShape(1, 576, 512)
    scaled = torch.nn.Module()
    for name in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "kv_b_proj"):
        setattr(scaled, name, getattr(module, name))
    scaled.expand_kv = lambda latent, rotated: tuple(2 * states for states in module.expand_kv(latent, rotated))
    assert latent_heads(scaled) is None
    scaled.expand_kv = module.expand_kv
    assert latent_heads(scaled) is not None
    scaled.kv_b_proj = torch.nn.Sequential(module.kv_b_proj)
    assert latent_heads(scaled) is None


def test_the_model_itself_is_left_alone(model):
    with hfpaged.patched(model):
        Case(model, random_prompts((4,)), [[]], 2).generate_batch()
        assert not any("expand_kv" in vars(module) for module in model.modules())
