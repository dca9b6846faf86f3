"""Rows end when stock's criteria end them."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hfpaged.sampling.stop import StopChecker, StopRule


def stock_finished(criteria: list[StoppingCriteria], tokens: list[int]) -> bool:
    return bool(StoppingCriteriaList(criteria)(torch.tensor([tokens]), None)[0])


def finished(criteria: list[StoppingCriteria], tokens: list[int]) -> bool:
    return StopChecker().finished([(tokens, StopRule.from_criteria(criteria))])[0]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE with tokens that overlap the stop strings on every side."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["stop stopper last opera \n\nUser: the end. größer €uro"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_max_length_counts_all_tokens(length: int) -> None:
    criteria = [MaxLengthCriteria(4)]
    assert finished(criteria, [9] * length) == stock_finished(criteria, [9] * length) == (length >= 4)


def test_a_given_max_length_replaces_that_of_the_list() -> None:
    rule = StopRule.from_criteria([MaxLengthCriteria(100)], max_length=4)
    assert StopChecker().finished([([1] * 3, rule), ([1] * 4, rule)]) == [False, True]


@pytest.mark.parametrize("eos", [7, [7, 3], [-1, 7], [-1], [2.5], [7.0], torch.tensor([7])])
@pytest.mark.parametrize("last", [7, 3, 2, 0])
def test_eos_matches_the_last_token_only(eos: Any, last: int) -> None:
    criteria = [EosTokenCriteria(eos)]
    assert finished(criteria, [7, last]) == stock_finished(criteria, [7, last])


def test_max_time_counts_from_when_the_criterion_was_made() -> None:
    assert finished([MaxTimeCriteria(5.0, initial_timestamp=time.time() - 6)], [1])
    assert not finished([MaxTimeCriteria(50.0, initial_timestamp=time.time() - 6)], [1])


def test_stop_strings_in_a_batch_match_what_stock_finds_row_by_row(tokenizer: PreTrainedTokenizerBase) -> None:
    generator = random.Random(0)
    criteria = [
        StopStringCriteria(tokenizer, ["stop", "\n\nUser:"]),
        StopStringCriteria(tokenizer, "€"),
        StopStringCriteria(tokenizer, ["stop", "\n\nUser:"]),
    ]
    pieces = ["stop", " last", "opper", "s", "to", "p", "\n", "\n\nUs", "er:", "größer", "€"]
    rows = []
    for _ in range(150):
        end = generator.choice(["stop", "stopper", "\n\nUser:", "€", "", "x"])
        text = "".join(generator.choices(pieces, k=generator.randint(0, 4))) + end
        tokens = tokenizer(text).input_ids[-generator.randint(1, 12) :] or [0]
        # An id that only the embedding knows.
        tokens = [999, *tokens] if generator.random() < 0.2 else tokens
        rows.append((tokens, generator.sample(criteria, generator.randint(0, 2))))
    expected = [stock_finished(chosen, tokens) if chosen else False for tokens, chosen in rows]
    assert StopChecker().finished([(tokens, StopRule.from_criteria(chosen)) for tokens, chosen in rows]) == expected
    assert 20 < sum(expected) < 130


def test_a_shorter_row_is_not_completed_by_its_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    last = tokenizer("x").input_ids
    for first in (0, len(tokenizer) - 1):
        rule = StopRule.from_criteria([StopStringCriteria(tokenizer, tokenizer.decode([first]) + "x")])
        assert StopChecker().finished([(last, rule), ([first, *last], rule)]) == [False, True]


def test_criteria_that_share_stocks_table_are_evaluated_once(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    original = StopStringCriteria.__call__

    def recording(self: StopStringCriteria, ids: torch.LongTensor, scores: Any) -> torch.BoolTensor:
        batches.append(ids.shape[0])
        return original(self, ids, scores)

    monkeypatch.setattr(StopStringCriteria, "__call__", recording)
    criterion = StopStringCriteria(tokenizer, "stop")
    # What a later call with the same strings gets from stock's cache of tables.
    rules = [StopRule.from_criteria([copy.copy(criterion)]) for _ in range(5)]
    tokens = tokenizer("please stop").input_ids
    assert StopChecker().finished([(tokens, rule) for rule in rules]) == [True] * 5
    assert batches == [5]


def words_tokenizer() -> PreTrainedTokenizerBase:
    """One whose tokens stock matches as text and not as bytes. Stock wants a text "abcdef" to exist."""
    words = ["a", "b", "ab", "ba", "bab", "\n", "é", "aé", "stop", "op", "€", "?", "abcdef"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")


@pytest.mark.parametrize("kind", ["byte level", "words"])
def test_random_strings_end_random_texts_where_stock_ends_them(tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    if kind == "words":
        tokenizer = words_tokenizer()
    generator = random.Random(1)
    strings = ["a", "ab", "aba", "bab", "b\nb", "op", "stop", "é", "aé", "€", "é€", "pp", " s", "\n\n", ""]
    vocabulary = sorted(set(tokenizer.get_vocab().values()))
    letters = tokenizer("".join("ababop é€st\n")).input_ids
    checker, ends = StopChecker(), 0
    for _ in range(60):
        chosen = generator.sample(strings, generator.randint(1, 4))
        try:
            criterion = StopStringCriteria(tokenizer, chosen)
        except ValueError:  # no token can hold the end of any of them
            continue
        texts = [
            generator.choices(generator.choice([letters, vocabulary]), k=generator.randint(1, 9)) for _ in range(40)
        ]
        expected = [stock_finished([criterion], text) for text in texts]
        rule = StopRule.from_criteria([criterion])
        assert checker.finished([(text, rule) for text in texts]) == expected, chosen
        ends += sum(expected)
    assert 100 < ends < 2000


def test_stock_is_not_asked_about_a_token_that_no_string_ends_in(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    criterion = StopStringCriteria(tokenizer, ["stop", "€"])
    monkeypatch.setattr(StopStringCriteria, "__call__", None)
    rule = StopRule.from_criteria([criterion])
    assert StopChecker().finished([(tokenizer("stop it").input_ids, rule)]) == [False]


def test_nothing_is_kept_of_tables_that_stock_has_dropped(tokenizer: PreTrainedTokenizerBase) -> None:
    checker = StopChecker()
    for number in range(3):
        criterion = copy.copy(StopStringCriteria(tokenizer, "stop"))
        criterion.embedding_vec = criterion.embedding_vec.clone()
        checker.finished([([number], StopRule.from_criteria([criterion]))])
        assert len(checker._string_ends) == 1
        del criterion
    assert not len(checker._string_ends)


class EndsOnEvenLength(StoppingCriteria):
    def __init__(self, as_tensor: bool) -> None:
        self.as_tensor = as_tensor

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor | bool:
        even = input_ids.shape[1] % 2 == 0
        return torch.full((input_ids.shape[0],), even) if self.as_tensor else even


@pytest.mark.parametrize("as_tensor", [False, True])
def test_unknown_criteria_are_called_with_the_row(as_tensor: bool) -> None:
    criteria = [EndsOnEvenLength(as_tensor)]
    assert [finished(criteria, [1] * length) for length in (1, 2, 3)] == [False, True, False]


def test_a_subclass_of_a_known_criterion_is_called_itself() -> None:
    class Never(EosTokenCriteria):
        def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    assert not finished([Never(7)], [7])


def test_any_criterion_ends_the_row(tokenizer: PreTrainedTokenizerBase) -> None:
    criteria = [MaxLengthCriteria(50), EosTokenCriteria([1]), StopStringCriteria(tokenizer, "stop")]
    assert finished(criteria, [2, 1])
    assert finished(criteria, tokenizer("stop").input_ids)
    assert finished(criteria, [2] * 50)
    assert not finished(criteria, [2] * 5)
