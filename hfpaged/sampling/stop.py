"""When a sequence ends: a stopping criteria list taken apart once, then checked for many rows without tensors."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)


@dataclass(frozen=True, slots=True)
class StopRule:
    """When one row ends.

    Attributes:
        max_length: at this many tokens, prompt included; None: never.
        eos_ids: after any of these tokens. An id that is negative or not whole matches no token, as in stock.
        deadline: after this moment, in seconds of `time.time()`; None: never.
        stop_strings: stock's criteria for strings.
        others: all other criteria.
    """

    max_length: int | None = None
    eos_ids: frozenset[float] = frozenset()
    deadline: float | None = None
    stop_strings: tuple[StopStringCriteria, ...] = ()
    others: tuple[Callable[..., Any], ...] = ()

    @property
    def looks_at_text(self) -> bool:
        """Whether more than the length, the last token and the clock decides."""
        return bool(self.stop_strings or self.others)

    def ends_with(self, length: int, token: int) -> bool:
        """Whether a sequence ends that has just reached `length` tokens with `token`, text and clock aside."""
        return (self.max_length is not None and length >= self.max_length) or token in self.eos_ids

    @classmethod
    def from_criteria(cls, criteria: Iterable[Callable[..., Any]], max_length: int | None = None) -> StopRule:
        """Compile a list that Transformers built from a generation config.

        Known classes are recognised by their exact type, so that a subclass keeps what it overrides.

        Args:
            max_length: takes the place of what the list says about the length, which counts a batch's padding.
        """
        lengths: list[int] = []
        eos_ids: set[float] = set()
        deadlines: list[float] = []
        stop_strings, others = [], []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                lengths.append(criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxTimeCriteria:
                deadlines.append(criterion.initial_timestamp + criterion.max_time)
            elif type(criterion) is StopStringCriteria:
                stop_strings.append(criterion)
            else:
                others.append(criterion)
        return cls(
            max_length=min(lengths, default=None) if max_length is None else max_length,
            eos_ids=frozenset(eos_ids),
            deadline=min(deadlines, default=None),
            stop_strings=tuple(stop_strings),
            others=tuple(others),
        )


Row = tuple[Sequence[int], StopRule]


class StopChecker:
    """Checks rows after each step. Keeps nothing between calls but what it knows of stock's tables while they live."""

    def __init__(self) -> None:
        self._string_ends: MutableMapping[torch.Tensor, Container[int]] = WeakTensorKeyDictionary()

    def finished(self, rows: Sequence[Row]) -> list[bool]:
        """Whether each row, with the token it just got as its last one, has ended.

        Args:
            rows: token ids, prompt included and without padding, and the row's rule.

        Raises:
            Whatever a criterion in `StopRule.others` raises.
        """
        now = time.time()
        ended = [
            rule.ends_with(len(tokens), tokens[-1]) or (rule.deadline is not None and now > rule.deadline)
            for tokens, rule in rows
        ]
        reading = [index for index, (_, rule) in enumerate(rows) if rule.looks_at_text and not ended[index]]
        if reading:
            self._check_stop_strings(rows, reading, ended)
        for index in reading:
            tokens, rule = rows[index]
            if not ended[index] and rule.others:
                ended[index] = _ends_by_others(tokens, rule)
        return ended

    def _check_stop_strings(self, rows: Sequence[Row], reading: Iterable[int], ended: list[bool]) -> None:
        """Call each stop-string criterion once for all rows that it may end, and note which of them ended."""
        # Criteria of separate calls with the same strings and tokenizer share one table, through stock's own cache.
        groups: dict[int, tuple[StopStringCriteria, list[int]]] = {}
        for index in reading:
            tokens, rule = rows[index]
            for criterion in rule.stop_strings:
                if tokens[-1] in self._ends_of(criterion):
                    groups.setdefault(id(criterion.embedding_vec), (criterion, []))[1].append(index)
        for criterion, members in groups.values():
            matches = criterion(_last_ids(criterion, [rows[index][0] for index in members]), None)
            for index, match in zip(members, matches.tolist(), strict=True):
                ended[index] = ended[index] or match

    def _ends_of(self, criterion: StopStringCriteria) -> Container[int]:
        table = criterion.embedding_vec
        ends = self._string_ends.get(table)
        if ends is None:
            ends = self._string_ends[table] = _string_ends(criterion)
        return ends


def _string_ends(criterion: StopStringCriteria) -> Container[int]:
    """The tokens that one of the criterion's strings can end in; no text that ends in another token matches.

    A row of its table has for each string the positions where the token fits into it, then for each string how much
    of the string's end the token can hold, then the token's length; -1 in places that are not used.
    """
    if "" in criterion.stop_strings:
        return range(sys.maxsize)
    first = criterion.max_valid_positions * criterion.num_stop_strings
    return frozenset((criterion.embedding_vec[:, first:-1] > 0).any(dim=1).nonzero()[:, 0].tolist())


def _last_ids(criterion: StopStringCriteria, sequences: Sequence[Sequence[int]]) -> torch.LongTensor:
    """The last ids that the criterion looks at, shorter rows padded on the left with an id that matches nothing."""
    # The last entry of the criterion's table is its own neutral one, for ids outside the vocabulary.
    neutral = criterion.embedding_vec.shape[0] - 1
    ends = [sequence[-criterion.maximum_token_len :] for sequence in sequences]
    width = max(len(end) for end in ends)
    return torch.tensor([[neutral] * (width - len(end)) + list(end) for end in ends], device="cpu")


def _ends_by_others(tokens: Sequence[int], rule: StopRule) -> bool:
    input_ids = torch.tensor([list(tokens)], device="cpu")
    return any(bool(torch.as_tensor(criterion(input_ids, None)).all()) for criterion in rule.others)
