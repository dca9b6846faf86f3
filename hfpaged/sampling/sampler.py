"""Sampler: the next token of each of many independent rows from one matrix of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hfpaged.errors import InvalidScoresError
from hfpaged.sampling.candidates import Candidates, can_truncate, truncate
from hfpaged.sampling.distribution import first_maximum, inverse_cdf
from hfpaged.sampling.processors import CompiledProcessors, apply_stages
from hfpaged.sampling.rng import uniforms
from hfpaged.sampling.stages import EXCLUDED

_SEED_MASK = (1 << 64) - 1
_MOST_CANDIDATES = 4096
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sequence that gets a token.

    Attributes:
        tokens: its token ids so far, prompt included. Always the same list object, which only grows at the end.
        processors: what reshapes its logits; compiled for this row alone. None: nothing.
        do_sample: draw from the distribution, or take the most likely token.
        seed, sample_index: key of its random numbers, together with the position, len(tokens).
        keep_scores: also return raw and processed scores.
    """

    tokens: Sequence[int]
    processors: CompiledProcessors | None = None
    do_sample: bool = False
    seed: int = 0
    sample_index: int = 0
    keep_scores: bool = False

    @property
    def is_argmax(self) -> bool:
        """Whether all that is wanted is the argmax of the row's logits."""
        return _is_plain(self) and not self.keep_scores


@dataclass(frozen=True, slots=True)
class Drawn:
    """What `Sampler.draw` returns, one entry a row in every list.

    Attributes:
        tokens: the drawn ids; -1 for a row with an error.
        scores: processed scores, float32[V], of rows with `keep_scores`, on the logits' device; None for the others.
        logits: the same for raw logits. The two may be one tensor.
        errors: what went wrong with a row, or None. Rows do not affect each other.
    """

    tokens: list[int]
    scores: list[Tensor | None]
    logits: list[Tensor | None]
    errors: list[Exception | None]

    @classmethod
    def of_tokens(cls, tokens: list[int]) -> Drawn:
        """Tokens that were drawn elsewhere, for rows that want nothing else; -1 is one that could not be."""
        nothing: list[None] = [None] * len(tokens)
        errors = [InvalidScoresError() if token == _NO_TOKEN else None for token in tokens]
        return cls(tokens, nothing, nothing, errors)


class Sampler:
    """Draws tokens. Keeps nothing between calls.

    Args:
        most_candidates: rows with a larger top-k than this are truncated on the whole vocabulary. The tokens are the
            same either way.
    """

    def __init__(self, most_candidates: int = _MOST_CANDIDATES) -> None:
        self._most_candidates = most_candidates

    def draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> Drawn:
        """Draw one token a row, each as stock `generate` would process that row alone.

        Args:
            logits: [R, V] of any floating dtype on any device; not modified.
            rows: R rows.
        """
        logits = logits.detach()
        count = len(rows)
        drawn = Drawn([_NO_TOKEN] * count, [None] * count, [None] * count, [None] * count)
        plain = [index for index, row in enumerate(rows) if _is_plain(row)]
        if plain:
            self._draw_plain(logits, rows, plain, drawn)
        if len(plain) < count:
            chosen = sorted(set(range(count)) - set(plain))
            self._draw_processed(logits, rows, chosen, drawn)
        return drawn

    def _draw_plain(self, logits: Tensor, rows: Sequence[SampleRow], chosen: list[int], drawn: Drawn) -> None:
        """Greedy rows whose scores are the logits."""
        for index, token in zip(chosen, first_maximum(_select(logits, chosen)), strict=True):
            drawn.tokens[index] = token
            if rows[index].keep_scores:
                drawn.logits[index] = drawn.scores[index] = logits[index].to(torch.float32, copy=True)

    def _draw_processed(self, logits: Tensor, rows: Sequence[SampleRow], chosen: list[int], drawn: Drawn) -> None:
        part = _select(logits, chosen)
        scores = part.to(torch.float32)
        batch = _Batch(scores, scores is logits, [rows[index] for index in chosen])
        batch.run_heads(self._most_candidates)
        batch.draw_truncated()
        batch.draw_greedy()
        batch.draw_sampled()
        for place, index in enumerate(chosen):
            drawn.errors[index] = batch.errors[place]
            if batch.errors[place] is not None:
                continue
            drawn.tokens[index] = batch.tokens[place]
            if rows[index].keep_scores:
                drawn.logits[index] = logits[index].to(torch.float32, copy=True)
                drawn.scores[index] = batch.scores[place].clone()


class _Batch:
    """Rows on their way from logits to tokens.

    Attributes:
        scores: float32[P, V].
        tokens: the drawn ids, None while a row waits.
        errors: a row with an error is left out of everything that follows.
    """

    def __init__(self, scores: Tensor, is_shared: bool, rows: list[SampleRow]) -> None:
        self.scores = scores
        self._is_shared = is_shared  # `scores` is not to be edited
        self.tokens: list[int | None] = [None] * len(rows)
        self.errors: list[Exception | None] = [None] * len(rows)
        self._rows = rows
        nothing = CompiledProcessors()
        self._processors = [row.processors or nothing for row in rows]
        self._histories = [
            processors.history(row.tokens) for processors, row in zip(self._processors, rows, strict=True)
        ]
        self._truncated: list[int] = []
        self._uniforms = _uniforms(rows)

    def run_heads(self, most_candidates: int) -> None:
        """Run all stages, except truncations that `draw_truncated` will do on candidates."""
        self._truncated = [
            index
            for index, (row, processors) in enumerate(zip(self._rows, self._processors, strict=True))
            if row.do_sample and processors.truncation and processors.truncation.candidate_count <= most_candidates
        ]
        if self._truncated and not can_truncate():
            self._truncated = []
        put_off = set(self._truncated)
        self._run(
            [
                processors.head if index in put_off else processors.stages
                for index, processors in enumerate(self._processors)
            ]
        )

    def draw_truncated(self) -> None:
        """Truncate and draw on candidates; rows where that is uncertain run the full stages instead."""
        rows = [index for index in self._truncated if self.errors[index] is None]
        if not rows:
            return
        candidates = truncate(_select(self.scores, rows), [self._processors[index].truncation for index in rows])
        places = inverse_cdf(candidates.scores, self._uniforms[rows])
        unsettled = self._unsettled(candidates, places, rows)
        for n, index in enumerate(rows):
            if index in unsettled:
                continue
            self._settle(index, int(candidates.ids[n, places[n]]) if places[n] >= 0 else _NO_TOKEN)
            if self._rows[index].keep_scores:
                self._keep_only(index, candidates.ids[n], candidates.scores[n])
        if unsettled:
            self._run(
                [
                    processors.stages[len(processors.head) :] if index in unsettled else ()
                    for index, processors in enumerate(self._processors)
                ]
            )

    def _unsettled(self, candidates: Candidates, places: list[int], rows: list[int]) -> set[int]:
        """The rows whose tokens, or scores if those are kept, depend on which candidates the full stages keep."""
        unsettled = {index for n, index in enumerate(rows) if candidates.uncertain[n]}
        doubtful = {n: columns for n, columns in candidates.doubtful.items() if not self._rows[rows[n]].keep_scores}
        unsettled.update(rows[n] for n in candidates.doubtful if n not in doubtful)
        # Every set that may be the right one: without the least likely doubtful one, without the two least likely, ...
        choices = [(n, columns[: k + 1]) for n, columns in doubtful.items() for k in range(len(columns))]
        if choices:
            owners = [n for n, _ in choices]
            scores = candidates.scores[owners]
            for row, (_, dropped) in zip(scores, choices, strict=True):
                row[dropped] = EXCLUDED
            drawn = inverse_cdf(scores, self._uniforms[[rows[n] for n in owners]])
            unsettled.update(rows[n] for n, place in zip(owners, drawn, strict=True) if place != places[n])
        return unsettled

    def draw_greedy(self) -> None:
        """Take the most likely token of the rows that do not sample."""
        rows = [index for index in self._waiting() if not self._rows[index].do_sample]
        if rows:
            for index, token in zip(rows, first_maximum(_select(self.scores, rows)), strict=True):
                self.tokens[index] = token

    def draw_sampled(self) -> None:
        """Draw for the rows that have no token yet from their full scores."""
        rows = self._waiting()
        if rows:
            for index, token in zip(rows, inverse_cdf(_select(self.scores, rows), self._uniforms[rows]), strict=True):
                self._settle(index, token)

    def _waiting(self) -> list[int]:
        return [
            index
            for index, (token, error) in enumerate(zip(self.tokens, self.errors, strict=True))
            if token is None and error is None
        ]

    def _editable_scores(self) -> Tensor:
        if self._is_shared:
            self.scores, self._is_shared = self.scores.clone(), False
        return self.scores

    def _run(self, stages: list) -> None:
        if not any(stages):
            return
        for index, error in enumerate(apply_stages(self._editable_scores(), stages, self._histories)):
            self.errors[index] = self.errors[index] or error

    def _settle(self, index: int, token: int) -> None:
        if token == _NO_TOKEN:
            self.errors[index] = InvalidScoresError()
        else:
            self.tokens[index] = token

    def _keep_only(self, index: int, ids: Tensor, scores: Tensor) -> None:
        """Make the row of the matrix what the full truncation stages would have left."""
        kept = scores > EXCLUDED
        row = self._editable_scores()[index]
        row.fill_(EXCLUDED)
        row[ids[kept].to(row.device)] = scores[kept].to(row.device)


def draw_from_scores(
    scores: Tensor, seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int]
) -> torch.LongTensor:
    """Draw from scores that the caller has processed, with the random numbers that `Sampler` would use.

    Args:
        scores: float32[B, V].
        seeds, sample_indices, positions: key of each row's random number; the position is that of the drawn token.

    Returns:
        int64[B] on the device of `scores`.

    Raises:
        InvalidScoresError: a row has NaN or +inf, or every token of it is excluded.
    """
    tokens = inverse_cdf(scores.detach(), keyed_uniforms(seeds, sample_indices, positions))
    if _NO_TOKEN in tokens:
        raise InvalidScoresError(
            f"cannot sample row {tokens.index(_NO_TOKEN)}: "
            "the processed scores contain NaN or +inf, or every token is excluded"
        )
    return torch.tensor(tokens, device=scores.device)


def _is_plain(row: SampleRow) -> bool:
    """Whether the row's token is just the argmax of its logits."""
    return not row.do_sample and (row.processors is None or not row.processors.stages)


def _uniforms(rows: Sequence[SampleRow]) -> npt.NDArray[np.float64]:
    return keyed_uniforms(
        [row.seed for row in rows], [row.sample_index for row in rows], [len(row.tokens) for row in rows]
    )


def keyed_uniforms(
    seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int]
) -> npt.NDArray[np.float64]:
    """`uniforms` of numbers of any size, one a row."""
    return uniforms(
        np.array([seed & _SEED_MASK for seed in seeds], dtype=np.uint64),
        np.array(sample_indices, dtype=np.uint64),
        np.array(positions, dtype=np.uint64),
    )


def _select(matrix: Tensor, rows: list[int]) -> Tensor:
    """Rows of a matrix, without a copy when they are all of them in order."""
    return matrix if rows == list(range(len(matrix))) else matrix[torch.tensor(rows, device=matrix.device)]
