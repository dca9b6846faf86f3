"""What else `generate` may be given or asked: embeddings, positions, no ids, all logits, other attention code."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import alone, left_padded
from families import PAD
from generation.by_family import NEW, OPTIONS, PROMPTS, both, fallbacks_of

from hfpaged.compat import cache_field

HALF = {**OPTIONS, "max_new_tokens": NEW // 2, "min_new_tokens": NEW // 2}
MODES = {"greedy": {}, "beam": {"num_beams": 2}, "static": {"cache_implementation": "static"}}


def embeddings(model, prompts=PROMPTS[2:]):
    return model.get_input_embeddings()(torch.tensor(prompts))


@pytest.mark.parametrize("mode", MODES)
def test_embeddings_instead_of_ids_give_new_tokens_only(family, mode):
    texts = [model.generate(inputs_embeds=embeddings(model), **OPTIONS, **MODES[mode]) for model in family]
    assert torch.equal(*texts)
    assert texts[0].shape == (1, NEW)
    assert texts[0].tolist() == [
        alone(family.stock, PROMPTS[2], **OPTIONS, **({} if mode == "static" else MODES[mode])),
    ]


@pytest.mark.parametrize("options", [{"max_length": 23, "eos_token_id": -1}, {"min_length": 22, "max_new_tokens": 8}])
@pytest.mark.parametrize("with_ids", [False, True])
def test_lengths_count_embeddings_as_stock_does(family, options, with_ids):
    """The prompt has 19 tokens. If any can end the text, it is all of those that would follow."""
    ids = [torch.tensor(PROMPTS[2:])] if with_ids else []
    end = {"do_sample": False, "pad_token_id": PAD, "eos_token_id": alone(family.stock, PROMPTS[2], **OPTIONS)}
    call = {**end, **options}
    texts = [model.generate(*ids, inputs_embeds=embeddings(model), **call) for model in family]
    assert torch.equal(*texts)
    assert texts[0].shape[1] > 1


def test_embeddings_of_no_tokens(family):
    source = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 7, family.stock.config.hidden_size, generator=source) * 0.1
    texts = [model.generate(inputs_embeds=vectors, **OPTIONS) for model in family]
    assert torch.equal(*texts)


def test_embeddings_with_ids_beside_them(family):
    """Stock returns the ids in front of what it generates from the embeddings."""
    ids = torch.tensor(PROMPTS[2:])
    texts = [model.generate(ids, inputs_embeds=embeddings(model), **OPTIONS) for model in family]
    assert torch.equal(*texts)
    assert torch.equal(texts[0], family.stock.generate(ids, **OPTIONS))


def test_goes_on_from_embeddings(family):
    for model in family:
        first = model.generate(inputs_embeds=embeddings(model), **HALF, return_dict_in_generate=True)
        longer = torch.cat([embeddings(model), model.get_input_embeddings()(first.sequences)], dim=1)
        again = {"inputs_embeds": longer, cache_field(): first[cache_field()]}
        text = torch.cat([first.sequences, model.generate(**again, **HALF)], dim=1)
        assert text[0].tolist() == alone(family.stock, PROMPTS[2], **OPTIONS)


def test_positions_of_the_users_own(family):
    """Those that `generate` would derive from the mask are the engine's; others are stock's."""
    mask = left_padded(PROMPTS)["attention_mask"]
    derived = (mask.cumsum(-1) - 1).clamp_min(0)
    for positions, counted in ((derived, {}), (derived + mask, {"position_ids": 1})):
        call = {**left_padded(PROMPTS), "position_ids": positions, **OPTIONS}
        texts = [family.stock.generate(**call)]
        assert counted == fallbacks_of(
            family.paged, lambda call=call, texts=texts: texts.append(family.paged.generate(**call))
        )
        assert torch.equal(*texts)


def test_without_ids_it_begins_with_the_bos_token(family):
    texts = [model.generate(**OPTIONS, bos_token_id=1) for model in family]
    assert torch.equal(*texts)
    assert texts[0].shape == (1, 1 + NEW)


def test_without_a_mask_padding_is_found_by_its_id(family):
    ids = left_padded(PROMPTS)["input_ids"]
    options = {**OPTIONS, "eos_token_id": 2}
    assert torch.equal(*(model.generate(ids, **options) for model in family))
    assert torch.equal(family.paged.generate(ids, **options), family.paged.generate(**left_padded(PROMPTS), **options))


def test_all_logits_or_the_last_make_no_difference(family):
    assert torch.equal(*(both(family, logits_to_keep=keep)[1] for keep in (0, 1)))
    assert torch.equal(*both(family, logits_to_keep=0))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_other_attention_code_gives_the_same_text(family, options):
    if family.stock.config.model_type == "gemma2":
        pytest.skip("Transformers refuses sdpa for attention with softcapping")
    stock = copy.deepcopy(family.stock)
    stock.set_attn_implementation("sdpa")
    paged = copy.deepcopy(stock).patch()
    call = {**left_padded(PROMPTS), **OPTIONS, **options}
    assert torch.equal(paged.generate(**call), stock.generate(**call))
    assert torch.equal(paged.generate(**call), family.stock.generate(**call))
    assert paged.config._attn_implementation == "sdpa"


def test_returned_cache_has_a_layer_for_each_with_all_but_the_last_token(family):
    call = {**left_padded(PROMPTS[2:]), **OPTIONS, "return_dict_in_generate": True}
    expected, got = (model.generate(**call)[cache_field()] for model in family)
    assert got.get_seq_length() == expected.get_seq_length() == len(PROMPTS[2]) + NEW - 1
    assert len(got.layers) == len(expected.layers)
    for ours, stocks in zip(got.layers, expected.layers, strict=True):
        assert type(ours) is type(stocks)
        torch.testing.assert_close(ours.keys, stocks.keys, atol=1e-4, rtol=1e-4)


def test_what_generate_inherits_is_still_there(family):
    for model in family:
        assert model.can_generate()
        assert "GenerationMixin" in [base.__name__ for base in type(model).__mro__]
    prepared = [
        model.prepare_inputs_for_generation(torch.tensor(PROMPTS[2:]), mine=5, is_first_iteration=True)
        for model in family
    ]
    assert prepared[0].keys() == prepared[1].keys()
    assert prepared[1]["mine"] == 5
    assert PAD == family.paged.config.pad_token_id
