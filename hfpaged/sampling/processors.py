"""CompiledProcessors: a row's logits processors, taken apart once so that many rows can run theirs together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hfpaged.sampling.candidates import Truncation
from hfpaged.sampling.history import TokenHistory
from hfpaged.sampling.stages import (
    EXCLUDED,
    BatchedStage,
    ExcludeTokens,
    History,
    MinP,
    RepetitionPenalty,
    RowStage,
    StockProcessor,
    Temperature,
    TopK,
    TopP,
)

Stage = BatchedStage | RowStage
_ENDLESS = float("inf")


class CompiledProcessors:
    """The stages of one row, in the order of the list they come from.

    Known classes are recognised by their exact type, so that a subclass keeps what it overrides; all others are called
    as stock calls them. Belongs to one row for the row's whole life, because it remembers that row's tokens.

    Args:
        processors: a list that Transformers built from a generation config for this one row.
        first: stages that come before.

    Attributes:
        stages: every stage.
        truncation: what the trailing top-k, top-p and min-p stages do together, or None if there are none that could
            run on a few candidate tokens instead of the whole vocabulary.
        head: the stages before `truncation`; all of them if that is None.
        looks_back: whether any stage looks at the tokens before.
    """

    __slots__ = ("_history", "head", "looks_back", "stages", "truncation")

    def __init__(
        self, processors: Iterable[Callable[[Tensor, Tensor], Tensor]] = (), first: Iterable[RowStage] = ()
    ) -> None:
        self.stages = (*first, *(_compile(processor) for processor in processors))
        start = _truncation_start(self.stages)
        self.truncation = Truncation.from_stages(self.stages[start:])
        self.head = self.stages if self.truncation is None else self.stages[:start]
        self._history = TokenHistory()
        self.looks_back = any(isinstance(stage, RowStage) for stage in self.stages)

    def history(self, tokens: Sequence[int]) -> History:
        """The row's tokens as int64[L], or nothing if no stage looks at them."""
        return self._history.update(tokens if self.looks_back else ())


def apply_stages(
    scores: Tensor, stages: Sequence[Sequence[Stage]], histories: Sequence[History]
) -> list[Exception | None]:
    """Run every row's stages, each row in its own order, the batched ones together where rows meet.

    Args:
        scores: float32[P, V], edited in place.
        stages: the stages of each of the P rows.
        histories: the tokens of each row, int64[L].

    Returns:
        What a processor raised, per row. Such a row's scores are meaningless.
    """
    errors: list[Exception | None] = [None] * len(stages)
    waiting = [list(reversed(row)) for row in stages]
    while True:
        for row, todo in enumerate(waiting):
            errors[row] = errors[row] or _run_row_stages(scores[row : row + 1], todo, histories[row])
        next_kinds = {type(todo[-1]) for todo in waiting if todo}
        if not next_kinds:
            return errors
        # The earliest in Transformers' order first, so that rows that lack it catch up before the later ones run.
        kind = min(next_kinds, key=lambda candidate: candidate.order)
        rows = [row for row, todo in enumerate(waiting) if todo and type(todo[-1]) is kind]
        kind.apply(scores, rows, [waiting[row].pop() for row in rows])


def _run_row_stages(scores: Tensor, todo: list[Stage], history: History) -> Exception | None:
    """Run and remove the row stages up to the next batched stage; on an error drop the rest."""
    try:
        while todo and isinstance(todo[-1], RowStage):
            todo.pop().apply(scores, history)
    except Exception as error:
        todo.clear()
        return error
    return None


def _truncation_start(stages: tuple[Stage, ...]) -> int:
    """Index of the first of the trailing stages that can run on candidates, len(stages) if there are none."""
    start = len(stages)
    for kind in (MinP, TopP, TopK):
        if start > 0 and type(stages[start - 1]) is kind:
            start -= 1
    # min_p alone excludes too little to gain from candidates.
    return len(stages) if start == len(stages) or type(stages[start]) is MinP else start


def _compile(processor: Callable[[Tensor, Tensor], Tensor]) -> Stage:
    compile_known = _KNOWN.get(type(processor))
    stage = compile_known(processor) if compile_known else None
    return stage or StockProcessor(processor)


def _is_plain(warper: Any) -> bool:
    """Whether a warper has the settings that Transformers gives it outside beam search."""
    return warper.filter_value == EXCLUDED and warper.min_tokens_to_keep == 1


def _compile_penalty(processor: RepetitionPenaltyLogitsProcessor) -> Stage | None:
    skip = processor.prompt_ignore_length
    if isinstance(skip, torch.Tensor):
        # One number for each row of a batch; more than one is not this row's, and stock says so itself.
        if skip.numel() != 1:
            return None
        skip = int(skip)
    return RepetitionPenalty(processor.penalty, skip or 0)


def _compile_begin(processor: SuppressTokensAtBeginLogitsProcessor) -> Stage | None:
    return _exclude(processor.begin_suppress_tokens, processor.begin_index, processor.begin_index + 1)


def _exclude(token_ids: Tensor, first_length: int, end_length: float) -> ExcludeTokens:
    # Stock looks the vocabulary up in the ids, so a negative or fractional id excludes nothing.
    valid = [int(token) for token in token_ids.flatten().tolist() if token >= 0 and token == int(token)]
    return ExcludeTokens(tuple(valid), first_length, end_length)


_KNOWN: dict[type, Callable[[Any], Stage | None]] = {
    TemperatureLogitsWarper: lambda p: Temperature(p.temperature),
    TopKLogitsWarper: lambda p: TopK(p.top_k) if _is_plain(p) else None,
    TopPLogitsWarper: lambda p: TopP(p.top_p) if _is_plain(p) else None,
    MinPLogitsWarper: lambda p: MinP(p.min_p) if _is_plain(p) else None,
    RepetitionPenaltyLogitsProcessor: _compile_penalty,
    MinLengthLogitsProcessor: lambda p: _exclude(p.eos_token_id, 0, p.min_length),
    MinNewTokensLengthLogitsProcessor: lambda p: _exclude(
        p.eos_token_id, 0, p.prompt_length_to_skip + p.min_new_tokens
    ),
    SuppressTokensLogitsProcessor: lambda p: _exclude(p.suppress_tokens, 0, _ENDLESS),
    SuppressTokensAtBeginLogitsProcessor: _compile_begin,
}
