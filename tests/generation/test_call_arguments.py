"""Where options and prompts of a call come from, and what is wrong with a call: as in stock."""

from __future__ import annotations

import pytest
import torch
from batches import left_padded
from families import PAD
from generation.rows_alone import GREEDY, PROMPTS, assert_rows_equal_stock_alone
from transformers import GenerationConfig


def test_config_object_is_honoured_overridden_and_left_alone(pair, plain):
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, repetition_penalty=1.8)
    before = config.to_dict()
    want = assert_rows_equal_stock_alone(pair, {"generation_config": config, "pad_token_id": PAD})
    assert {len(text) for text in want} == {4}
    assert_rows_equal_stock_alone(
        pair, {"generation_config": config, "repetition_penalty": 1.0, "max_new_tokens": 6, "pad_token_id": PAD}
    )
    assert config.to_dict() == before
    assert not hasattr(config, "_eos_token_tensor")


def test_models_own_config_is_honoured(pair, enders):
    own = {"repetition_penalty": 1.5, "max_new_tokens": 6, "eos_token_id": enders, "suppress_tokens": [31]}
    before = pair.paged.generation_config.to_dict()
    for model in pair:
        model.generation_config.update(**own)
    try:
        assert_rows_equal_stock_alone(pair, {"do_sample": False})
        assert_rows_equal_stock_alone(pair, {"do_sample": False, "repetition_penalty": 1.0})
    finally:
        for model in pair:
            model.generation_config = GenerationConfig.from_dict(before)


def test_call_leaves_the_models_config_alone(pair):
    before = pair.paged.generation_config.to_dict()
    pair.paged.generate(**left_padded(PROMPTS), do_sample=True, temperature=0.3, max_new_tokens=3, hfpaged={"seed": 3})
    assert pair.paged.generation_config.to_dict() == before


BAD_CALLS = {
    "typo": {"max_new_tokenz": 3},
    "not the model's": {"token_type_ids": torch.zeros(1, 4, dtype=torch.long)},
    "no new token": {"max_new_tokens": 0},
    "too short": {"max_length": 3},
    "greedy twice": {"num_return_sequences": 2},
    "cold": {"do_sample": True, "temperature": 0.0},
    "top_p": {"do_sample": True, "top_p": -0.5},
    "penalty": {"repetition_penalty": -1.0},
    "no tokenizer": {"stop_strings": ["a"]},
    "bias outside": {"sequence_bias": {(500,): 1.0}},
    "bad words": {"bad_words_ids": "x"},
    "min above max": {"min_new_tokens": 9, "max_new_tokens": 2},
    "constraint": {"prefix_allowed_tokens_fn": lambda batch, ids: []},
    "no such cache": {"cache_implementation": "shared"},
    "looks nothing up": {"prompt_lookup_num_tokens": 0},
    "more than beams": {"num_beams": 2, "num_return_sequences": 3},
    "never early": {"num_beams": 2, "early_stopping": "late"},
    "constraint of beams": {"num_beams": 2, "prefix_allowed_tokens_fn": lambda batch, ids: []},
    "streamed beams": {"num_beams": 2, "streamer": object()},
    "no such repository": {"custom_generate": "/no/such/repository"},
    "no list of processors": {"logits_processor": 3},
}


def outcome(call):
    try:
        return call().tolist()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_gets_stocks_error(pair, name):
    call = {**left_padded([PROMPTS[1]]), "do_sample": False, **BAD_CALLS[name]}
    want = outcome(lambda: pair.stock.generate(**call))
    assert outcome(lambda: pair.paged.generate(**call)) == want
    assert name == "min above max" or isinstance(want, tuple)


INPUTS = {
    "positional": lambda ids: ((ids,), {}),
    "inputs": lambda ids: ((), {"inputs": ids}),
    "int32": lambda ids: ((ids.int(),), {}),
    "no mask, pad inside": lambda ids: ((torch.tensor([[PAD, PAD, 5, 6, 7]]),), {}),
    "boolean mask": lambda ids: ((ids,), {"attention_mask": torch.ones_like(ids).bool()}),
    "position_ids": lambda ids: ((ids,), {"position_ids": torch.arange(ids.shape[1])[None]}),
    "non-contiguous": lambda ids: ((ids.repeat(2, 1).t().contiguous().t()[:1],), {}),
    "nothing": lambda ids: ((), {}),
    "use_cache=False": lambda ids: ((ids,), {"use_cache": False}),
    "mask with a hole": lambda ids: ((ids,), {"attention_mask": torch.tensor([[1, 0] + [1] * (ids.shape[1] - 2)])}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INPUTS)
def test_every_way_to_pass_a_prompt(pair, name):
    args, kwargs = INPUTS[name](torch.tensor([PROMPTS[2]]))
    want = pair.stock.generate(*args, **kwargs, **GREEDY)
    got = pair.paged.generate(*args, **kwargs, **GREEDY)
    assert got.tolist() == want.tolist()
    assert got.dtype == want.dtype
