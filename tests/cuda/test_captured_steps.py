"""Captured steps over a recorder that replays operations in fixed memory, as a CUDA graph does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import alone, random_prompts
from engine.hooks import WAIT_SECONDS, paused
from families import build_tiny
from internals import workspace_of
from standin.captured import GREEDY, NEW, captured, stock, together
from standin.contract import Misuse
from transformers import LlamaModel

import hfpaged
from hfpaged.runtime.batch import StepBatch
from hfpaged.runtime.device.inputs import MOST_SINGLE_TOKENS, padded, single_tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("rows", [1, 3])
def test_replays_give_the_same_texts(patched, cuda, family, rows):
    prompts = random_prompts((20, 5, 33)[:rows])
    _, engine = patched(family)
    assert together(engine, prompts) == stock(family, prompts)
    counted = engine.stats()
    assert (counted["capture_problem"], counted["capture_breaks"]) == (None, {})
    # One step to read the prompts, one to warm up this size.
    assert counted["captured_steps"] == NEW - 2
    assert cuda.device.captures == 1


def with_experts_that_count_their_tokens():
    model = build_tiny("mixtral")
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("rows", [1, 3])
def test_modules_that_look_at_their_numbers_run_between_pieces(cuda, rows):
    prompts = random_prompts((20, 5, 33)[:rows])
    model = with_experts_that_count_their_tokens()
    layers = model.config.num_hidden_layers
    with hfpaged.patched(model):
        engine = hfpaged.engine(model)
        assert together(engine, prompts) == stock("mixtral", prompts)
        counted = engine.stats()
        assert counted["capture_breaks"] == {"MixtralExperts": layers}
        assert counted["capture_problem"] is None
        assert counted["captured_steps"] == NEW - 2
        # The first attempt failed.
        assert cuda.device.captures == 1 + layers + 1
        assert not any("forward" in vars(module) for module in captured(engine)._work.recorder._model.modules())


class Watching(LlamaModel):
    """A backbone that looks at its input on the host."""

    def forward(self, input_ids, **options):
        assert input_ids.max().item() < 1 << 20
        return super().forward(input_ids, **options)


def test_what_holds_attention_layers_is_not_left_out_of_a_capture(patched):
    prompts = random_prompts((20, 5))
    model, engine = patched()
    model.model.__class__ = Watching
    assert together(engine, prompts) == stock("llama", prompts)
    counted = engine.stats()
    assert counted["captured_steps"] == 0
    assert counted["capture_problem"].startswith("the step cannot be captured (RuntimeError: aten._local_scalar_dense")
    assert counted["capture_breaks"] == {}


def test_steps_that_verify_guesses_are_captured(patched):
    prompt = (random_prompts((6,))[0] * 6)[:30]
    model, engine = patched()
    options = {"max_new_tokens": 40, "prompt_lookup_num_tokens": 3, **GREEDY}
    alone(model, prompt, **options)
    before = engine.stats()
    again = alone(model, prompt, **options)
    after = engine.stats()
    assert [again] == stock("llama", [prompt], 40)
    assert after["accepted_tokens"] - before["accepted_tokens"] > 5
    # All but the one that reads the prompt.
    assert after["captured_steps"] - before["captured_steps"] == after["steps"] - before["steps"] - 1


def test_steps_of_a_draft_model_are_captured(patched):
    draft, options = build_tiny("llama"), {"num_assistant_tokens": 3}
    model, engine = patched()
    prompt = random_prompts((20,))[0]
    want = stock("llama", [prompt], 20)[0]
    assert alone(model, prompt, max_new_tokens=20, assistant_model=draft, **options, **GREEDY) == want
    (drafts,) = engine._stepper._speculation._draft_models.values()
    assert drafts._steps.workspaces.current.tier.replayed_steps > 5


def test_a_request_with_guesses_is_one_for_each_of_its_tokens():
    batch = StepBatch(
        token_ids=np.array([7, 8, 9, 4]),
        positions=np.array([15, 16, 17, 3]),
        slots=np.array([31, 48, 49, 67]),
        query_start=np.array([0, 3, 4], dtype=np.int32),
        context_len=np.array([18, 4], dtype=np.int32),
        table_rows=np.array([5, 2], dtype=np.int32),
        block_tables=np.zeros((6, 4), dtype=np.int32),
        block_size=16,
        logit_rows=np.arange(4),
        feedback=np.full(4, -1),
    )
    single = single_tokens(batch)
    assert single.query_start.tolist() == [0, 1, 2, 3, 4]
    assert single.context_len.tolist() == [16, 17, 18, 4]
    assert single.table_rows.tolist() == [5, 5, 5, 2]
    assert single.slots is batch.slots
    assert single_tokens(single) is single
    long = MOST_SINGLE_TOKENS + 1
    assert single_tokens(replace(batch, query_start=np.array([0, long], dtype=np.int32))) is None


def test_warming_up_captures_all_sizes_that_requests_can_need(patched, cuda, capfd):
    prompts = random_prompts((4, 5, 6))
    _, engine = patched(max_requests=20)
    assert engine.warm_up() == 6
    assert captured(engine).sizes == [1, 2, 4, 8, 16, 24]
    assert "capturing steps" in capfd.readouterr().err
    captures = cuda.device.captures
    # A step and its draws for each size.
    assert captures == 2 * 6
    assert engine.stats()["captured_steps"] == 0
    assert together(engine, prompts) == stock("llama", prompts)
    assert cuda.device.captures == captures
    # All but the step that reads the prompts, and the one token that comes first.
    assert engine.stats()["captured_steps"] == NEW - 1 + 1


def test_warming_up_stops_when_the_memory_for_captured_steps_is_used_up(patched, cuda):
    cuda.device.memory, cuda.device.memory_of_a_capture = 1 << 30, 1 << 25
    _, engine = patched(max_requests=20, num_blocks=64)
    engine.warm_up()
    # A tenth of it is room for two and their draws; the largest came first.
    assert captured(engine).sizes == [16, 24]
    assert engine.stats()["capture_problem"] == "the memory for captured steps is used up"


def test_a_batch_is_padded_to_the_next_size(patched):
    prompts = random_prompts((4, 5, 6, 7, 8, 9, 10, 11, 12))
    _, engine = patched()
    assert together(engine, prompts[:3]) == stock("llama", prompts[:3])
    assert captured(engine).sizes == [4]
    assert together(engine, prompts) == stock("llama", prompts)
    assert captured(engine).sizes == [4, 16]


def test_rows_that_end_make_the_batch_smaller(patched):
    prompts = random_prompts((4, 5, 6, 7, 8))
    _, engine = patched()
    engine.submit([5], max_new_tokens=1, **GREEDY).result(WAIT_SECONDS)
    lengths = (3, 6, 9, 12, 15)
    with paused(engine):
        handles = [
            engine.submit(prompt, max_new_tokens=new, **GREEDY) for prompt, new in zip(prompts, lengths, strict=True)
        ]
    texts = [handle.result(WAIT_SECONDS) for handle in handles]
    assert texts == [text[:new] for text, new in zip(stock("llama", prompts, 15), lengths, strict=True)]
    assert len(captured(engine).sizes) >= 2


def test_every_replay_comes_after_a_plan_for_it(patched, monkeypatch):
    """The stand-in notices where it does not: a replay with the plan of the step before gives wrong numbers."""
    prompts = random_prompts((20, 5))
    _, engine = patched()
    together(engine, prompts)
    backend = workspace_of(engine).backend
    begin = backend.begin_ahead
    monkeypatch.setattr(
        backend, "begin_ahead", lambda batch, slots, size=None: None if size else begin(batch, slots, size)
    )
    handle = engine.submit(prompts[0], max_new_tokens=NEW, **GREEDY)
    engine.submit(prompts[0], max_new_tokens=NEW, **GREEDY)
    with pytest.raises(Misuse, match="plan of the one before"):
        handle.result(WAIT_SECONDS)


def test_padding_never_writes_into_the_pool(patched):
    """The padding rows' slot is in a block behind the pool."""
    _, engine = patched(num_blocks=16)
    together(engine, random_prompts((4, 5, 6)))
    workspace = workspace_of(engine)
    assert workspace.cache.layers[0].key.shape[0] == 17
    written = [not layer.key[16].isnan().all() for layer in workspace.cache.layers]
    assert all(written)
    assert workspace.pool.num_blocks == 16


def test_padding_of_a_batch():
    batch = StepBatch(
        token_ids=np.array([7, -1, 9]),
        positions=np.array([4, 20, 0]),
        slots=np.array([20, 36, 0]),
        query_start=np.array([0, 1, 2, 3], dtype=np.int32),
        context_len=np.array([5, 21, 1], dtype=np.int32),
        table_rows=np.array([3, 1, 2], dtype=np.int32),
        block_tables=np.zeros((4, 4), dtype=np.int32),
        block_size=16,
        logit_rows=np.arange(3),
        feedback=np.array([-1, 2, -1]),
    )
    wide = padded(batch, 5, padding_block=40)
    assert wide.token_ids.tolist() == [7, -1, 9, 0, 0]
    assert wide.feedback.tolist() == [-1, 2, -1, -1, -1]
    assert wide.slots.tolist() == [20, 36, 0, 640, 640]
    assert wide.context_len.tolist() == [5, 21, 1, 1, 1]
    assert wide.table_rows.tolist() == [3, 1, 2, 0, 0]
    assert wide.query_start.tolist() == [*wide.logit_rows.tolist(), 5]
    assert padded(batch, 3, padding_block=40) is batch


def test_a_step_that_cannot_be_captured_runs_uncaptured_and_says_why(patched, cuda):
    cuda.device.fails_to_capture = True
    prompts = random_prompts((20, 5))
    _, engine = patched()
    assert together(engine, prompts) == stock("llama", prompts)
    counted = engine.stats()
    assert counted["captured_steps"] == 0
    assert counted["capture_problem"].startswith("the step cannot be captured (RuntimeError")


def test_capturing_stops_when_its_memory_is_used_up(patched, cuda):
    cuda.device.memory, cuda.device.memory_of_a_capture = 1 << 30, 1 << 27
    prompts = random_prompts((4, 5, 6, 7, 8))
    _, engine = patched(num_blocks=64)
    together(engine, prompts[:1])
    assert engine.stats()["capture_problem"] == "the memory for captured steps is used up"
    assert together(engine, prompts) == stock("llama", prompts)
    assert captured(engine).sizes == [1]


def test_weights_that_change_in_place_are_seen_and_moved_ones_captured_again(patched, cuda):
    prompts = random_prompts((20, 5))
    model, engine = patched()
    together(engine, prompts)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert together(engine, prompts) == [alone_on_copy(model, prompt) for prompt in prompts]
    assert captured(engine).sizes == [2]
    captures = cuda.device.captures
    state = {name: tensor * 1.01 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert together(engine, prompts) == [alone_on_copy(model, prompt) for prompt in prompts]
    assert cuda.device.captures > captures


def test_weights_that_are_replaced_while_a_captured_step_reads_them_stay_in_memory(patched):
    """Their requests end with one or the other, not with memory that is somebody else's by now."""
    prompts = random_prompts((20, 5))
    model, engine = patched()
    together(engine, prompts)
    held = [tensor.data_ptr() for tensor in captured(engine)._held]
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert set(before.values()) <= set(held)
    assert not set(before.values()) & {tensor.data_ptr() for tensor in model.parameters()}


def alone_on_copy(model, prompt):
    fresh = build_tiny("llama")
    fresh.load_state_dict(model.state_dict())
    return alone(fresh, prompt, max_new_tokens=NEW, **GREEDY)


def test_a_batch_with_more_pages_than_the_fixed_tables_hold_runs_uncaptured(patched, monkeypatch):
    from hfpaged.runtime.attention import flashinfer_backend

    monkeypatch.setattr(flashinfer_backend, "FIXED_PAGES", 3)
    prompts = random_prompts((40, 40))
    _, engine = patched()
    assert together(engine, prompts) == stock("llama", prompts)
    assert engine.stats()["captured_steps"] == 0
