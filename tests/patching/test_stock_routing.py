"""Calls that are not the engine's: stock's outputs, counted by reason, or refused by name if the user prefers."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import left_padded
from families import build_tiny
from oracle import GREEDY, NEW, PROMPTS, assert_stock_text, greedy, stats
from transformers import DynamicCache

from hfpaged.compat import cache_field
from hfpaged.errors import UnsupportedOptionError

BATCH = left_padded(PROMPTS)
ONE = left_padded(PROMPTS[:1])


def user_cache(model):
    """The system prompt's cache, handed back with the whole conversation."""
    ids = ONE["input_ids"]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :20], **{cache_field(): cache})
    return {"input_ids": ids, "attention_mask": ONE["attention_mask"], cache_field(): cache}


def empty_user_cache(model):
    return {**ONE, cache_field(): DynamicCache(config=model.config)}


def embeddings_alone(model):
    return {"inputs_embeds": model.get_input_embeddings()(ONE["input_ids"]).detach()}


def embeddings_with_ids(model):
    return {**embeddings_alone(model), **ONE}


def shifted_positions(model):
    return {**ONE, "position_ids": torch.arange(37)[None] + 5}


def mask_with_holes(model):
    mask = BATCH["attention_mask"].clone()
    mask[0, 10:14] = 0
    return {**BATCH, "attention_mask": mask}


def right_padding(model):
    return {name: tensor.flip(-1) for name, tensor in BATCH.items()}


# What is passed beside the prompts, and the reason that is counted.
CALLS = {
    "user cache": (user_cache, "user cache"),
    "empty user cache": (empty_user_cache, "user cache"),
    "embeddings": (embeddings_alone, "model argument inputs_embeds"),
    "embeddings and ids": (embeddings_with_ids, "model argument inputs_embeds"),
    "positions": (shifted_positions, "position_ids"),
    "holes": (mask_with_holes, "mask with holes"),
    "right padding": (right_padding, "mask with holes"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation"),
    "hidden states": ({"output_hidden_states": True}, "attentions or hidden states"),
    "attentions": ({"output_attentions": True}, "attentions or hidden states"),
    "beams without cache": ({"num_beams": 3, "use_cache": False}, "use_cache=False"),
    "sampled beams with attentions": (
        {"num_beams": 2, "do_sample": True, "output_attentions": True},
        "attentions or hidden states",
    ),
}


def arguments_for(call, model):
    prompts = call(model) if callable(call) else {**BATCH, **call}
    return {**GREEDY, "max_new_tokens": NEW, "return_dict_in_generate": True, **prompts}


def assert_same_output(got, want):
    assert list(got) == list(want)
    assert torch.equal(got.sequences, want.sequences)
    for name in ("hidden_states", "attentions"):
        for one, other in zip(got.get(name) or (), want.get(name) or (), strict=True):
            assert all(torch.equal(mine, stocks) for mine, stocks in zip(one, other, strict=True))


@pytest.mark.parametrize(("call", "reason"), CALLS.values(), ids=CALLS)
def test_left_to_stock(model, call, reason):
    stock = copy.deepcopy(model)
    torch.manual_seed(0)
    want = stock.generate(**arguments_for(call, stock))
    model.patch()
    torch.manual_seed(0)
    got = model.generate(**arguments_for(call, model))
    assert type(got) is type(want)
    assert_same_output(got, want)
    assert stats(model)["fallbacks"] == {reason: 1}
    assert stats(model)["steps"] == 0
    assert_stock_text(model)


@pytest.mark.parametrize(("call", "reason"), CALLS.values(), ids=CALLS)
def test_refused_by_name(model, call, reason):
    model.patch(on_unsupported="raise")
    with pytest.raises(UnsupportedOptionError, match=reason):
        model.generate(**arguments_for(call, model))
    assert stats(model)["fallbacks"] == {}
    assert_stock_text(model)


@pytest.fixture
def process_group():
    """A group of one, as a launcher makes it for a single process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_synced_gpus(model, process_group):
    want = copy.deepcopy(model).generate(**BATCH, max_new_tokens=NEW, **GREEDY)
    model.patch()
    assert torch.equal(model.generate(**BATCH, synced_gpus=True, max_new_tokens=NEW, **GREEDY), want)
    assert stats(model)["fallbacks"] == {"synced_gpus": 1}


OTHER_LOOPS = ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": "another"})


@pytest.mark.parametrize("call", OTHER_LOOPS, ids=lambda call: next(iter(call)))
def test_other_decoding_loops_are_stocks(model, call):
    if "assistant_model" in call:
        call = {"assistant_model": build_tiny("llama", seed=1, num_hidden_layers=1)}
    want = copy.deepcopy(model).generate(**ONE, **call, max_new_tokens=NEW, **GREEDY)
    model.patch()
    assert torch.equal(model.generate(**ONE, **call, max_new_tokens=NEW, **GREEDY), want)


def test_patched_assistant(model):
    """The assistant's own calls are stock's too: they bring a cache and go back in it."""
    assistant = build_tiny("llama", seed=1, num_hidden_layers=1)
    want = model.generate(**ONE, assistant_model=assistant, max_new_tokens=NEW, **GREEDY)
    assistant.patch()
    assert torch.equal(model.generate(**ONE, assistant_model=assistant, max_new_tokens=NEW, **GREEDY), want)
    assert stats(assistant)["steps"] == 0
    assert_stock_text(assistant)


def test_train_mode_with_dropout():
    model = build_tiny("llama", num_hidden_layers=2, attention_dropout=0.4).train()
    torch.manual_seed(0)
    want = copy.deepcopy(model).generate(**BATCH, max_new_tokens=NEW, **GREEDY)
    model.patch()
    torch.manual_seed(0)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=NEW, **GREEDY), want)
    assert stats(model)["fallbacks"] == {"dropout in train mode": 1}
    assert_stock_text(model.eval())


def test_own_prepare_inputs(model):
    """Whoever replaces it on the instance has something to add to each step."""
    model.patch()
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: prepare(*args, **kwargs)
    want = copy.deepcopy(model).generate(**BATCH, max_new_tokens=NEW, **GREEDY)
    assert torch.equal(model.generate(**BATCH, max_new_tokens=NEW, **GREEDY), want)
    assert stats(model)["fallbacks"] == {"prepare_inputs_for_generation replaced": 1}
    del model.prepare_inputs_for_generation
    assert_stock_text(model)


def test_plain_positions_are_the_engines(model):
    model.patch()
    positions = (BATCH["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    model.generate(**BATCH, position_ids=positions, max_new_tokens=NEW, **GREEDY)
    model.generate(**ONE, position_ids=torch.arange(37)[None], max_new_tokens=NEW, **GREEDY)
    assert stats(model)["fallbacks"] == {}


def test_labels_of_an_evaluation_are_dropped_as_in_stock(model):
    want = model.generate(**BATCH, max_new_tokens=NEW, **GREEDY)
    model.patch(on_unsupported="raise")
    got = model.generate(**BATCH, labels=BATCH["input_ids"], max_new_tokens=NEW, **GREEDY)
    assert torch.equal(got, want)


def test_returned_cache_of_turn_one_goes_into_turn_two(model):
    """A call that wants its cache back ran on stock code; the cache is a stock one."""
    stock = copy.deepcopy(model)
    model.patch()
    outputs = []
    for one in (stock, model):
        first = one.generate(**user_cache(one), max_new_tokens=NEW, return_dict_in_generate=True, **GREEDY)
        ids = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=-1)
        kwargs = {"attention_mask": torch.ones_like(ids), cache_field(): first[cache_field()]}
        outputs.append(one.generate(ids, max_new_tokens=NEW, **kwargs, **GREEDY))
    assert torch.equal(*outputs)
    assert stats(model)["fallbacks"] == {"user cache": 2}


def test_typos_still_fail(model):
    model.patch()
    with pytest.raises(ValueError, match="max_new_tokenz"):
        model.generate(**BATCH, max_new_tokenz=3)


def test_greedy_after_every_fallback_is_still_warm(model):
    """Stock calls leave the engine's caches alone."""
    model.patch()
    greedy(model)
    cached = stats(model)["cached_prompt_tokens"]
    for call in (shifted_positions, {"output_hidden_states": True, "output_attentions": True}, {"use_cache": False}):
        model.generate(**arguments_for(call, model))
    greedy(model)
    assert stats(model)["cached_prompt_tokens"] >= cached + 32
    assert stats(model)["weight_changes"] == 0
