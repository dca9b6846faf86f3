"""Every option of generate() on the engine's path gives each row what stock gives that prompt alone."""

from __future__ import annotations

import pytest
import torch
from batches import alone, left_padded
from families import EOS, PAD
from generation.rows_alone import (
    GREEDY,
    NEW,
    PROMPTS,
    WIDTH,
    Unchanged,
    assert_close,
    assert_rows_equal_stock_alone,
)
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

import hfpaged


def fallbacks(model):
    return hfpaged.engine(model).stats()["fallbacks"]


def texts(plain, *places):
    """Tokens of the plain texts, so that options about them must show."""
    return [plain[row][column] for row, column in places]


# Name -> options made from the plain texts and the end tokens. All of them change some row.
OPTIONS = {
    "eos list": lambda plain, enders: {"eos_token_id": enders},
    "one eos": lambda plain, enders: {"eos_token_id": enders[0]},
    "eos and pad": lambda plain, enders: {"eos_token_id": enders, "pad_token_id": 7},
    "pad is eos": lambda plain, enders: {"eos_token_id": enders[0], "pad_token_id": enders[0]},
    "repetition_penalty": lambda plain, enders: {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": lambda plain, enders: {"no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": lambda plain, enders: {"encoder_repetition_penalty": 3.0},
    "encoder_no_repeat_ngram_size": lambda plain, enders: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda plain, enders: {"bad_words_ids": [texts(plain, (0, 0)), texts(plain, (2, 1), (2, 2))]},
    "min_new_tokens": lambda plain, enders: {"eos_token_id": enders, "min_new_tokens": 5},
    "forced_bos_token_id": lambda plain, enders: {"forced_bos_token_id": 9},
    "forced_eos_token_id": lambda plain, enders: {"forced_eos_token_id": EOS},
    "suppress_tokens": lambda plain, enders: {"suppress_tokens": texts(plain, (0, 0), (1, 3), (4, 5))},
    "begin_suppress_tokens": lambda plain, enders: {
        "begin_suppress_tokens": texts(plain, *((row, 0) for row in range(5)))
    },
    "exponential_decay": lambda plain, enders: {"exponential_decay_length_penalty": (3, 3.0)},
    "sequence_bias": lambda plain, enders: {
        "sequence_bias": {tuple(texts(plain, (0, 0))): -9.0, tuple(texts(plain, (1, 0), (1, 1))): -9.0}
    },
    "watermark": lambda plain, enders: {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "watermark by itself": lambda plain, enders: {
        "watermarking_config": WatermarkingConfig(bias=6.0, seeding_scheme="selfhash")
    },
    "synthid": lambda plain, enders: {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 6, 7, 8])
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option_row_by_row(pair, plain, enders, name):
    options = {**GREEDY, "eos_token_id": -1, **OPTIONS[name](plain, enders)}
    if name == "exponential_decay":
        options["eos_token_id"] = EOS
    assert assert_rows_equal_stock_alone(pair, options) != plain
    assert not fallbacks(pair.paged)


@pytest.mark.parametrize("room", [1, 2, NEW])
def test_max_length_leaves_all_rows_what_it_leaves_the_batch(pair, room):
    assert_rows_equal_stock_alone(
        pair,
        {"do_sample": False, "eos_token_id": -1, "max_length": WIDTH + room},
        {"do_sample": False, "eos_token_id": -1, "max_new_tokens": room},
    )


@pytest.mark.parametrize("least", [1, 4, 8])
def test_min_length_asks_of_all_rows_what_it_asks_of_the_batch(pair, enders, least):
    common = {**GREEDY, "eos_token_id": enders}
    assert_rows_equal_stock_alone(pair, {**common, "min_length": WIDTH + least}, {**common, "min_new_tokens": least})


def test_forced_end_token_comes_at_max_length(pair):
    common = {"do_sample": False, "eos_token_id": -1, "forced_eos_token_id": EOS}
    want = assert_rows_equal_stock_alone(pair, {**common, "max_length": WIDTH + 4}, {**common, "max_new_tokens": 4})
    assert [text[-1] for text in want] == [EOS] * len(PROMPTS)


def test_default_length_is_stocks(pair):
    prompt = PROMPTS[2]
    with pytest.warns(UserWarning, match="max_length"):
        want = alone(pair.stock, prompt, do_sample=False, eos_token_id=-1)
        assert alone(pair.paged, prompt, do_sample=False, eos_token_id=-1) == want


@pytest.mark.parametrize("with_eos", [True, False])
def test_stop_strings(pair, tokenizer, plain, with_eos):
    strings = [tokenizer.decode(plain[1][2:5]), tokenizer.decode(plain[4][6:7])]
    options = {**GREEDY, "stop_strings": strings, "tokenizer": tokenizer}
    if with_eos:
        want = assert_rows_equal_stock_alone(pair, {**options, "eos_token_id": 127})
        assert [len(text) for text in want] == [len(text) for text in ended_by(plain, strings, tokenizer)]
        assert want[1] == plain[1][:5]
        return
    # Without an end token stock goes on with all rows until each of them has met a string.
    for model in pair:
        model.generation_config.eos_token_id = None
    try:
        common = {**left_padded(PROMPTS), **options, "pad_token_id": PAD}
        assert pair.paged.generate(**common).tolist() == pair.stock.generate(**common).tolist()
    finally:
        for model in pair:
            model.generation_config.eos_token_id = EOS


def ended_by(plain, strings, tokenizer):
    for text in plain:
        ends = (n for n in range(1, NEW) if any(s in tokenizer.decode(text[:n]) for s in strings))
        yield text[: next(ends, NEW)]


def test_max_time_zero_ends_after_one_token(pair):
    want = assert_rows_equal_stock_alone(pair, {**GREEDY, "max_time": 0.0})
    assert {len(text) for text in want} == {1}


def test_max_time_ends_a_long_text(pair):
    assert len(alone(pair.paged, PROMPTS[1], do_sample=False, eos_token_id=-1, max_new_tokens=450, max_time=0.02)) < 450


WARPERS = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_k": 0, "top_p": 0.7},
    "min_p": {"top_k": 0, "min_p": 0.2},
    "top_k, top_p, min_p": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    "typical_p": {"top_k": 0, "typical_p": 0.6},
    "epsilon_cutoff": {"top_k": 0, "epsilon_cutoff": 0.01},
    "eta_cutoff": {"top_k": 0, "eta_cutoff": 0.05},
    "top_h": {"top_k": 0, "top_h": 0.4},
    "renormalize_logits": {"temperature": 0.8, "renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "repetition_penalty": {"repetition_penalty": 1.4, "top_k": 10},
}


@pytest.mark.parametrize("name", WARPERS)
def test_sampling_option_gives_stocks_scores(pair, name):
    options = {
        **WARPERS[name], "do_sample": True, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    got = pair.paged.generate(**left_padded(PROMPTS), **options).scores[0]
    for row, prompt in enumerate(PROMPTS):
        assert_close(got[row], pair.stock.generate(**left_padded([prompt]), **options).scores[0][0])


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_scores_and_logits_of_every_step(pair, enders, in_lockstep):
    options = {
        **GREEDY, "eos_token_id": enders, "pad_token_id": 7, "repetition_penalty": 1.2,
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    }  # fmt: skip
    users = {"logits_processor": [Unchanged()]} if in_lockstep else {}
    got = pair.paged.generate(**left_padded(PROMPTS), **options, **users)
    assert type(got).__name__ == "GenerateDecoderOnlyOutput"
    assert got.attentions is None
    assert got.hidden_states is None
    wants = [pair.stock.generate(**left_padded([prompt]), **options) for prompt in PROMPTS]
    steps = max(len(want.scores) for want in wants)
    assert len(got.scores) == len(got.logits) == steps == got.sequences.shape[1] - WIDTH
    only_pad = torch.full((128,), float("-inf"))
    only_pad[7] = 0.0
    assert min(len(want.scores) for want in wants) < steps
    for row, want in enumerate(wants):
        for step in range(steps):
            if step < len(want.scores):
                assert_close(got.scores[step][row], want.scores[step][0])
                assert_close(got.logits[step][row], want.logits[step][0])
            else:
                assert torch.equal(got.scores[step][row], only_pad)
                assert got.sequences[row, WIDTH + step] == 7


def test_scores_and_logits_are_left_out_unless_asked_for(pair):
    out = pair.paged.generate(**left_padded(PROMPTS), **GREEDY, return_dict_in_generate=True)
    assert out.scores is None
    assert out.logits is None
    assert torch.is_tensor(pair.paged.generate(**left_padded(PROMPTS), **GREEDY, output_scores=True))


def test_returned_scores_are_not_overwritten_by_later_steps(pair):
    options = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    out = pair.paged.generate(**left_padded(PROMPTS), **options)
    before = [step.clone() for step in out.scores]
    pair.paged.generate(**left_padded(PROMPTS), **options)
    assert all(torch.equal(*both) for both in zip(before, out.scores, strict=True))


@pytest.mark.parametrize("copies", [1, 3])
def test_num_return_sequences_keeps_order_and_shape(pair, copies):
    options = {**GREEDY, "do_sample": True, "top_k": 1, "num_return_sequences": copies}
    out = pair.paged.generate(**left_padded(PROMPTS), **options)
    want = pair.paged.generate(**left_padded(PROMPTS), **{**options, "num_return_sequences": 1})
    assert out.tolist() == want.repeat_interleave(copies, dim=0).tolist()
