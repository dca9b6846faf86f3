"""What is added to logits before any of Transformers' processors: biases and the penalties of the OpenAI API."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hfpaged.sampling.stages import History, RowStage


@dataclass(frozen=True, slots=True)
class LogitBias(RowStage):
    """biases[i] is added to the logit of token_ids[i]. Ids that the head cannot produce have no logit."""

    token_ids: tuple[int, ...]
    biases: tuple[float, ...]

    def apply(self, scores: Tensor, history: History) -> None:
        ids = torch.tensor(self.token_ids)
        known = ids < scores.shape[1]
        biases = torch.tensor(self.biases, dtype=scores.dtype)
        scores[0, ids[known].to(scores.device)] += biases[known].to(scores.device)


@dataclass(frozen=True, slots=True)
class AdditivePenalty(RowStage):
    """logit -= count * frequency + (count > 0) * presence, where count is how often the answer has the token.

    That is the definition of the OpenAI API's penalties; the prompt, `skip` tokens, does not count.
    """

    presence: float
    frequency: float
    skip: int

    def apply(self, scores: Tensor, history: History) -> None:
        answer = history[self.skip :]
        ids, counts = np.unique(answer[answer < scores.shape[1]], return_counts=True)
        penalty = torch.from_numpy(counts).to(scores.device, scores.dtype) * self.frequency + self.presence
        scores[0, torch.from_numpy(ids).to(scores.device)] -= penalty
