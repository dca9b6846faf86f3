"""The cache that generate() returns: passed back, cropped, copied, read, after unpatch and after a weight change."""

import copy
import gc
import io

import pytest
import torch
from batches import left_padded

import hfpaged
from hfpaged.compat import cache_field
from hfpaged.errors import EngineReleasedError

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14] * 3, [20, 21, 22]]
OPTIONS = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture
def models(tiny_model):
    stock = tiny_model("llama")
    return stock, copy.deepcopy(stock).patch()


def first_turn(model, prompts=PROMPTS[:1]):
    return model.generate(**left_padded(prompts), return_dict_in_generate=True, **OPTIONS)


def second_turn(model, output, extra=(40, 41, 42), **more):
    ids = torch.cat([output.sequences, torch.tensor([extra] * len(output.sequences))], dim=1)
    kwargs = {cache_field(): output[cache_field()], **more}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS, **kwargs)


def test_passed_back_it_goes_on_as_stock_does_on_cached_blocks(models):
    stock, patched = models
    expected = second_turn(stock, first_turn(stock))
    output = first_turn(patched)
    assert output[cache_field()].get_seq_length() == output.sequences.shape[1] - 1
    before = hfpaged.engine(patched).stats()["cached_prompt_tokens"]
    assert torch.equal(second_turn(patched, output), expected)
    stats = hfpaged.engine(patched).stats()
    assert stats["cached_prompt_tokens"] - before >= 32
    assert stats["fallbacks"] == {}


def read(cache):
    assert list(cache)
    return cache


def saved_and_loaded(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("use", [lambda cache: cache, copy.copy, copy.deepcopy, read, saved_and_loaded])
def test_a_padded_batch_can_be_passed_back(models, use):
    texts = []
    for model in models:
        output = first_turn(model, PROMPTS)
        ids = output.sequences
        mask = torch.cat([left_padded(PROMPTS)["attention_mask"], torch.ones(2, 20, dtype=torch.long)], dim=1)
        kwargs = {cache_field(): use(output[cache_field()])}
        texts.append(model.generate(ids, attention_mask=mask, **OPTIONS, **kwargs))
    assert torch.equal(*texts)


def test_cropped_and_deep_copied_it_is_as_stocks(models):
    texts = []
    for model in models:
        output = first_turn(model)
        cache = copy.deepcopy(output[cache_field()])
        cache.crop(-6)
        ids = output.sequences[:, : cache.get_seq_length() + 1]
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS, **{cache_field(): cache}))
        texts.append(second_turn(model, output))
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[3])


def test_code_that_reads_keys_and_values_gets_them(models):
    caches = [first_turn(model)[cache_field()] for model in models]
    for expected, got in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(got.keys, expected.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.values, expected.values, atol=1e-4, rtol=1e-4)
    token = torch.tensor([[33]])
    logits = [model(token, **{cache_field(): cache}).logits for model, cache in zip(models, caches, strict=True)]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-3, rtol=1e-3)


def never(input_ids, scores, **kwargs):
    return False


LOOPS = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams that end": {"num_beams": 3, "eos_token_id": list(range(40, 90))},
    "assisted, with user code": {"prompt_lookup_num_tokens": 3, "stopping_criteria": [never]},
}


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_after_beams_and_assisted_decoding_it_has_stocks_keys_and_values(models, options):
    """One row for each beam that was still running."""
    call = {**left_padded(PROMPTS[:1]), **OPTIONS, **options, "return_dict_in_generate": True}
    expected, got = (model.generate(**call)[cache_field()] for model in models)
    assert got.get_seq_length() == expected.get_seq_length()
    for ours, stocks in zip(got.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys, stocks.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, stocks.values, atol=1e-4, rtol=1e-4)
    assert hfpaged.engine(models[1]).stats()["fallbacks"] == {}


def test_it_outlives_the_patch(models):
    stock, patched = models
    expected = second_turn(stock, first_turn(stock))
    output = first_turn(patched)
    patched.unpatch()
    assert torch.equal(second_turn(patched, output), expected)


def test_after_a_weight_change_it_stands_for_the_new_weights(models):
    _, patched = models
    output = first_turn(patched)
    with torch.no_grad():
        for parameter in patched.parameters():
            parameter.data *= 1.05
    fresh = copy.deepcopy(patched)
    ids = torch.cat([output.sequences, torch.tensor([[40, 41, 42]])], dim=1)
    expected = fresh.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
    assert torch.equal(second_turn(patched, output), expected)


def test_without_its_model_it_raises_by_name(tiny_model):
    model = tiny_model("llama").patch()
    cache = first_turn(model)[cache_field()]
    hfpaged.unpatch(model)
    del model
    gc.collect()
    with pytest.raises(EngineReleasedError, match="gone"):
        list(cache)
