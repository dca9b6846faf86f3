"""Options together, any two values of any two of them: each row has what stock gives that prompt alone."""

from __future__ import annotations

import itertools

import pytest
from batches import left_padded
from families import EOS, PAD
from generation.rows_alone import (
    GREEDY,
    PROMPTS,
    WIDTH,
    Unchanged,
    assert_close,
    assert_rows_equal_stock_alone,
)

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
