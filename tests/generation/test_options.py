"""Every option of generate() on the engine's path gives each row what stock gives that prompt alone."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from batches import alone, left_padded, padded_rows, random_prompts
from families import BOS, EOS, PAD
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import hfpaged

PROMPTS = [[BOS], *random_prompts((4, 9, 16, 17))]
WIDTH = 17
NEW = 10
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def plain(pair):
    """Greedy texts that nothing ends."""
    return [alone(pair.stock, prompt, eos_token_id=-1, **GREEDY) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def enders(plain):
    """End tokens at which some rows end early and others do not."""
    return [plain[1][2], plain[3][6]]


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


def assert_rows_equal_stock_alone(pair, batch_options, row_options=None, prompts=PROMPTS):
    """Rows of one padded call of the engine, against stock on each prompt alone. Returns the texts."""
    want = [alone(pair.stock, prompt, **(row_options or batch_options)) for prompt in prompts]
    out = pair.paged.generate(**left_padded(prompts), **batch_options)
    assert out.dtype == torch.long
    assert out.tolist() == padded_rows(prompts, want, batch_options.get("pad_token_id", PAD)).tolist()
    return want


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


def assert_close(got, want):
    """Equal up to float32 rounding, and excluded (-inf) in the same places."""
    assert got.dtype == want.dtype == torch.float32
    assert torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WARPERS)
def test_sampling_option_gives_stocks_scores(pair, name):
    options = {
        **WARPERS[name], "do_sample": True, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    got = pair.paged.generate(**left_padded(PROMPTS), **options).scores[0]
    for row, prompt in enumerate(PROMPTS):
        assert_close(got[row], pair.stock.generate(**left_padded([prompt]), **options).scores[0][0])


class Unchanged(LogitsProcessor):
    """A user's own processor, which puts its call in lockstep."""

    def __call__(self, input_ids, scores):
        return scores


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


# ---- where options come from ----


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


# ---- streamers ----


def test_text_streamer_prints_what_stock_prints(pair, tokenizer, capsys):
    printed = []
    for model in pair:
        model.generate(**left_padded([PROMPTS[2]]), streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[0].strip()) >= NEW


def test_text_iterator_streamer_in_the_usual_thread(pair, tokenizer):
    pieces = []
    for model in pair:
        streamer = TextIteratorStreamer(tokenizer, timeout=10)
        call = {**left_padded([PROMPTS[3]]), **GREEDY, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=call)
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1]


class Recorder(BaseStreamer):
    """Writes down everything it is given."""

    def __init__(self):
        self.puts = []

    def put(self, value):
        self.puts.append((value.dtype, value.device.type, value.tolist()))

    def end(self):
        self.puts.append("end")


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_streamer_is_given_what_stock_gives_it(pair, enders, rows):
    seen = []
    for model in pair:
        streamer = Recorder()
        model.generate(**left_padded(PROMPTS[-rows:]), streamer=streamer, eos_token_id=enders, **GREEDY)
        seen.append(streamer.puts)
    assert seen[0] == seen[1]
    assert seen[0][-1] == "end"


def test_streamer_that_takes_one_row_refuses_a_batch_as_in_stock(pair, tokenizer):
    for model in pair:
        with pytest.raises(ValueError, match="only supports batch size 1"):
            model.generate(**left_padded(PROMPTS), streamer=TextStreamer(tokenizer), **GREEDY)


# ---- pairs of options ----

FACTORS = {
    "end": [{"eos_token_id": -1}, {"eos_token_id": "enders"}, {"eos_token_id": "enders", "pad_token_id": 7}],
    "penalty": [{}, {"repetition_penalty": 1.6}],
    "ngram": [{}, {"no_repeat_ngram_size": 2}],
    "least": [{}, {"min_new_tokens": 4}],
    "words": [{}, {"bad_words_ids": [[40], [48, 48]]}],
    "suppressed": [{}, {"suppress_tokens": [32, 75], "begin_suppress_tokens": [76]}],
    "forced": [{}, {"forced_eos_token_id": EOS}],
    "bias": [{}, {"sequence_bias": {(86,): 4.0}}],
    "strings": [{}, {"stop_strings": "strings"}],
    "likeliest": [{}, {"do_sample": True, "top_k": 1, "temperature": 0.7}],
    "output": [{}, {"return_dict_in_generate": True, "output_scores": True}],
    "user": [{}, {"logits_processor": "user"}],
    "prefix": [{}, {"hfpaged": {"prefix_cache": False, "priority": 3}}],
}


def pairwise(factors):
    """Choices of one level a factor, such that any two levels of any two factors meet in one of them. Greedy."""
    levels = {name: range(len(values)) for name, values in factors.items()}
    missing = {((a, i), (b, j)) for a, b in itertools.combinations(levels, 2) for i in levels[a] for j in levels[b]}
    while missing:
        chosen = dict(min(missing))
        for name in levels:
            if name not in chosen:
                chosen[name] = max(levels[name], key=lambda level: len(covered({**chosen, name: level}) & missing))
        missing -= covered(chosen)
        yield tuple(chosen[name] for name in levels)


def covered(chosen):
    order = list(FACTORS)
    items = sorted(chosen.items(), key=lambda item: order.index(item[0]))
    return set(itertools.combinations(items, 2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("choice", list(pairwise(FACTORS)), ids=lambda choice: "".join(map(str, choice)))
def test_pair_of_options(pair, plain, enders, tokenizer, choice):
    options = dict(GREEDY)
    for values, level in zip(FACTORS.values(), choice, strict=True):
        options.update(values[level])
    if options["eos_token_id"] == "enders":
        options["eos_token_id"] = enders
    if "stop_strings" in options:
        options.update(stop_strings=[tokenizer.decode(plain[4][4:6])], tokenizer=tokenizer)
    if "logits_processor" in options:
        options["logits_processor"] = [Unchanged()]
    only_stock = {name: value for name, value in options.items() if name != "hfpaged"}
    if "return_dict_in_generate" not in options:
        assert_rows_equal_stock_alone(pair, options, only_stock)
        return
    got = pair.paged.generate(**left_padded(PROMPTS), **options)
    for row, prompt in enumerate(PROMPTS):
        want = pair.stock.generate(**left_padded([prompt]), **only_stock)
        text = want.sequences[0, len(prompt) :].tolist()
        assert got.sequences[row, WIDTH : WIDTH + len(text)].tolist() == text
        assert set(got.sequences[row, WIDTH + len(text) :].tolist()) <= {options.get("pad_token_id", PAD)}
        for step in range(len(text)):
            assert_close(got.scores[step][row], want.scores[step][0])
