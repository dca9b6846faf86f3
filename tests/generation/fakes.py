"""Processors, criteria and streamers that behave as those of real libraries do: over the batch, with state, and rudely.

Every one writes down the calls it gets, so that a test can hold the trace against stock's. Patterns and where they come
from are described in each class.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from families import PAD, VOCAB_SIZE
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

WAIT_SECONDS = 30


class Recording:
    """Mixin: the trace of calls as (ids, shape and dtype of scores, values of scores)."""

    def __init__(self) -> None:
        self.trace: list[tuple] = []
        self.scores: list[torch.Tensor] = []
        self.threads: set[int] = set()

    def record(self, input_ids: torch.Tensor, scores: Any) -> None:
        self.threads.add(threading.get_ident())
        shape = (tuple(scores.shape), scores.dtype) if torch.is_tensor(scores) else None
        self.trace.append((input_ids.tolist(), input_ids.dtype, shape))
        if torch.is_tensor(scores):
            self.scores.append(scores.clone())


class ObservingProcessor(Recording, LogitsProcessor):
    """Looks and changes nothing."""

    def __call__(self, input_ids, scores):
        self.record(input_ids, scores)
        return scores


class ObservingCriteria(Recording, StoppingCriteria):
    """Looks and ends nothing. With `output_scores` it is given the tuple of all scores so far."""

    def __call__(self, input_ids, scores, **kwargs):
        self.record(input_ids, scores)
        self.trace[-1] += (None if scores is None else len(scores),)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class RowGrammar(Recording, LogitsProcessor):
    """One matcher a row, as xgrammar keeps them: each call feeds row i's newest token to matcher i.

    A matcher that is given an illegal token, or another number of rows, raises. After `words` tokens of its residue
    class a row must end.
    """

    def __init__(self, moduli: list[int], words: list[int], eos: int):
        super().__init__()
        self.moduli, self.words, self.eos = moduli, words, eos
        self.accepted = [0] * len(moduli)
        self.ended = [False] * len(moduli)
        self.prompt_width: int | None = None

    def __call__(self, input_ids, scores):
        self.record(input_ids, scores)
        if input_ids.shape[0] != len(self.moduli):
            raise RuntimeError(f"{input_ids.shape[0]} rows for {len(self.moduli)} matchers")
        if self.prompt_width is None:
            self.prompt_width = input_ids.shape[1]
        else:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                self._accept(row, token)
        if input_ids.shape[1] != self.prompt_width + len(self.trace) - 1:
            raise RuntimeError("a step was skipped or repeated")
        for row in range(len(self.moduli)):
            if not self.ended[row]:
                scores[row, ~self._allowed(row)] = -float("inf")
        return scores

    def _allowed(self, row: int) -> torch.Tensor:
        tokens = torch.arange(VOCAB_SIZE)
        if self.accepted[row] == self.words[row]:
            return tokens == self.eos
        return (tokens % self.moduli[row] == self.accepted[row] % self.moduli[row]) & (tokens > self.eos)

    def _accept(self, row: int, token: int) -> None:
        if self.ended[row]:
            return
        if not self._allowed(row)[token]:
            raise RuntimeError(f"row {row}: token {token} is illegal after {self.accepted[row]} tokens")
        self.accepted[row] += 1
        self.ended[row] = token == self.eos


class PrefixGrammar(Recording, LogitsProcessor):
    """State is looked up by the exact tokens of a row, padding included, as outlines does; an unknown one raises."""

    def __init__(self, modulus: int = 5):
        super().__init__()
        self.modulus = modulus
        self.states: dict[tuple[int, ...], int] = {}

    def __call__(self, input_ids, scores):
        self.record(input_ids, scores)
        for row, ids in enumerate(map(tuple, input_ids.tolist())):
            if len(self.trace) == 1:
                self.states[ids] = 0
            elif ids not in self.states:
                self.states[ids] = self.states[ids[:-1]] + 1
            allowed = torch.arange(VOCAB_SIZE) % self.modulus == self.states[ids] % self.modulus
            scores[row, ~allowed] = -float("inf")
        return scores


class DoneTracker(Recording, StoppingCriteria):
    """lm-eval's stop: made for one batch size and padded width, `done` a row, and one bool for all of them."""

    def __init__(self, rows: int, start: int, stops: set[int]):
        super().__init__()
        self.done = [False] * rows
        self.start, self.stops = start, stops

    def __call__(self, input_ids, scores, **kwargs):
        self.record(input_ids, scores)
        for row, ids in enumerate(input_ids[:, self.start :].tolist()):
            if not self.done[row]:
                self.done[row] = bool(self.stops & set(ids[-2:]))
        if len(self.done) != input_ids.shape[0]:
            raise IndexError(f"{input_ids.shape[0]} rows, {len(self.done)} expected")
        return all(self.done)


class StopOneRow(Recording, StoppingCriteria):
    """Ends each row at its own number of calls, by a tensor."""

    def __init__(self, steps: list[int]):
        super().__init__()
        self.steps = torch.tensor(steps)

    def __call__(self, input_ids, scores, **kwargs):
        self.record(input_ids, scores)
        return self.steps <= len(self.trace)


class RaisingCriteria(Recording, StoppingCriteria):
    """Cancels by an exception, as text-generation-webui's callbacks do."""

    def __init__(self, error: BaseException, step: int):
        super().__init__()
        self.error, self.step = error, step

    def __call__(self, input_ids, scores, **kwargs):
        self.record(input_ids, scores)
        if len(self.trace) == self.step:
            raise self.error
        return False


class BlockingCriteria(Recording, StoppingCriteria):
    """Blocks in its `step`-th call until it is let go."""

    def __init__(self, step: int):
        super().__init__()
        self.step = step
        self.blocked, self.go_on = threading.Event(), threading.Event()

    def __call__(self, input_ids, scores, **kwargs):
        self.record(input_ids, scores)
        if len(self.trace) == self.step:
            self.blocked.set()
            if not self.go_on.wait(WAIT_SECONDS):
                raise TimeoutError("nobody let the criterion go on")
        return False


class Iteratorized(StoppingCriteria):
    """Text for a slow reader through a queue of one; after `close` the next call raises."""

    def __init__(self) -> None:
        self.queue: queue.Queue[list[int]] = queue.Queue(maxsize=1)
        self.closed = threading.Event()

    def __call__(self, input_ids, scores, **kwargs):
        self.queue.put(input_ids[0].tolist(), timeout=WAIT_SECONDS)
        if self.closed.is_set():
            raise ValueError("the reader went away")
        return False


class InnerModel(Recording, LogitsProcessor):
    """Asks the model itself in every call: a plain forward, and a whole generate() (contrastive decoding, search)."""

    def __init__(self, model: PreTrainedModel, inner: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.model, self.inner = model, inner

    def __call__(self, input_ids, scores):
        self.record(input_ids, scores)
        return scores + self.inner(self.model, input_ids)


def plain_forward(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last token by itself, as the amateur of contrastive decoding."""
    with torch.no_grad():
        return -0.5 * model(input_ids[:, -1:]).logits[:, -1]


def inner_generate(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """A bonus for what a short continuation of each row contains."""
    ids = input_ids[:, -2:].clamp_min(PAD + 1)
    ahead = model.generate(ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids))
    return torch.zeros(len(ids), VOCAB_SIZE).scatter(1, ahead[:, 2:], 2.0)


class GlobalStreamer(BaseStreamer):
    """One streamer object for all users, as some apps have it."""

    def __init__(self) -> None:
        self.trace: list[list] = []

    def put(self, value):
        self.trace.append(value.tolist())

    def end(self):
        self.trace.append(["end"])


class AllowedTokens:
    """`prefix_allowed_tokens_fn`: what may follow depends on the row and its length."""

    def __init__(self, forbid_at: int | None = None) -> None:
        self.trace: list[tuple[int, list[int]]] = []
        self.forbid_at = forbid_at

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        self.trace.append((row, ids.tolist()))
        if len(self.trace) == self.forbid_at:
            return []
        return [token for token in range(3, VOCAB_SIZE) if (token + row + len(ids)) % 3]
