"""Stock `generate()` on a comparison's prompts: Transformers' own code, on an unpatched twin with the same weights."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hfpaged.demo.lane import Lane, Track
from hfpaged.models.end_tokens import end_tokens


def warm_up(twin: PreTrainedModel, prompt: Sequence[int]) -> None:
    """Pay the one-time costs of a first call."""
    twin.generate(**_inputs(twin, [prompt], pad=0), max_new_tokens=2, do_sample=False)


def run_one_by_one(
    twin: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, lane: Lane, stopped: threading.Event
) -> None:
    """One call for each prompt, in turn: what a server does that leaves batching to chance."""
    for prompt, track in zip(prompts, lane.tracks, strict=True):
        if not stopped.is_set():
            _generate(twin, [prompt], new_tokens, [track], stopped)
        track.finish()


def run_as_batch(
    twin: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, lane: Lane, stopped: threading.Event
) -> None:
    """One call with all prompts, padded on the left; it goes on until the longest answer is done."""
    _generate(twin, prompts, new_tokens, lane.tracks, stopped)
    for track in lane.tracks:
        track.finish()


def alone(twin: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Greedy new tokens of one prompt, up to and with the end-of-sequence token."""
    output = twin.generate(**_inputs(twin, [prompt], pad=0), max_new_tokens=new_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


def _generate(
    twin: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    tracks: Sequence[Track],
    stopped: threading.Event,
) -> None:
    ends = end_tokens(twin)
    pad = next(iter(ends), 0)
    twin.generate(
        **_inputs(twin, prompts, pad),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=pad,
        streamer=_TrackWriter(tracks, ends),
        stopping_criteria=[_Until(stopped)],
    )


def _inputs(twin: PreTrainedModel, prompts: Sequence[Sequence[int]], pad: int) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids.to(twin.device), "attention_mask": mask.to(twin.device)}


class _TrackWriter(BaseStreamer):
    """Writes each row's tokens to its track, up to and with its first end token; padding follows that."""

    def __init__(self, tracks: Sequence[Track], ends: Container[int]):
        self._tracks = tracks
        self._ends = ends
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """The prompts first, then [B] tokens a step."""
        if self._is_prompt:
            self._is_prompt = False
            return
        for track, token in zip(self._tracks, value.tolist(), strict=True):
            if not track.done:
                track.add(token)
                if token in self._ends:
                    track.finish()

    def end(self) -> None:
        """The last token has come."""


class _Until(StoppingCriteria):
    """Ends a call when an event is set."""

    def __init__(self, stopped: threading.Event):
        self._stopped = stopped

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        return torch.full((input_ids.shape[0],), self._stopped.is_set(), dtype=torch.bool, device=input_ids.device)
