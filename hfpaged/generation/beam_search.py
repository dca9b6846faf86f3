"""Beam search and beam sampling over paged rows.

Transformers' own methods decide, from the candidates of each step, which beams go on, which have finished and whether
the search is over. The loop around them is here because of its memory: a step is about scores of all beams over the
whole vocabulary, and tensors of that size, allocated anew, cost more than what is computed in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from hfpaged.compat import beam_output
from hfpaged.generation.call import GenerateCall
from hfpaged.generation.outputs import beam_fill_token, num_end_tokens
from hfpaged.generation.paged_model import PagedCache, PagedModel
from hfpaged.generation.returned_cache import returned_cache

# Score of what no beam can be yet.
IMPOSSIBLE = -1e9


class StepMemory:
    """Tensors as large as the scores of a step, [B * N, V] fp32, that the next step computes in again.

    Each is empty before the first step, and None where every step needs one of its own.

    Attributes:
        logits: raw; they may be part of the output.
        log_probs: processed; they may be part of the output, or be kept by a processor of the user's.
        sums: of `log_probs` and the scores of the beams that they go on from; a user's processor decides their dtype.
    """

    def __init__(self, call: GenerateCall, device: torch.device):
        self.users_look = call.processors.any_needs_batch
        self.logits = None if call.keeps_logits else torch.empty(0, device=device)
        self.sums = None if self.users_look else torch.empty(0, device=call.input_ids.device)
        self.log_probs = None if call.keeps_scores else self.sums


@dataclass
class Beams:
    """N sequences of each of B prompts, the best first.

    Attributes:
        sequences: [B, N, maximum length] ids.
        scores: [B, N] fp32 sums of log-probabilities; of finished ones with the length penalty.
        origins: int32 [B, N, most new tokens], the row that each new token was computed in; -1 behind the last one.
    """

    sequences: torch.LongTensor
    scores: torch.Tensor
    origins: torch.Tensor


class BeamSearch:
    """Runs one call to its end.

    Args:
        model: decides.
        paged: computes; its cache is empty, and closed by the caller.
    """

    def __init__(self, model: PreTrainedModel, paged: PagedModel, call: GenerateCall):
        self._model = model
        self._paged = paged
        self._cache: PagedCache = paged.paged_cache
        self._call = call
        self._num_beams = call.config.num_beams
        self._num_prompts = call.num_rows // self._num_beams
        self._length = call.padded_len
        # Some beams are to be left if all of the best end with one of the end tokens.
        self._num_candidates = max(2, 1 + num_end_tokens(call)) * self._num_beams
        self._running = self._first_beams()
        self._finished = Beams(
            self._running.sequences.clone(),
            torch.full_like(self._running.scores, IMPOSSIBLE),
            self._running.origins.clone(),
        )
        self._is_finished = torch.zeros_like(self._running.scores, dtype=torch.bool)
        self._can_improve = self._is_finished.new_ones(self._num_prompts, 1)
        self._scores: tuple[torch.Tensor, ...] | None = () if call.keeps_scores else None
        self._logits: tuple[torch.Tensor, ...] | None = () if call.keeps_logits else None
        self._memory = StepMemory(call, model.device)

    def run(self) -> torch.LongTensor | GenerateBeamDecoderOnlyOutput:
        """Search until no beam that goes on could become better than the finished ones."""
        ids = self._call.input_ids
        self._paged.start(ids, self._call.attention_mask)
        while True:
            candidates = self._candidates(self._log_probs(ids))
            ended = self._ended(candidates)
            self._choose_running(candidates, ended)
            self._keep_finished(candidates, ended)
            self._length += 1
            if not self._goes_on(ended):
                return self._output()
            self._cache.reorder_cache(self._running.origins[..., self._new_tokens - 1].flatten())
            ids = self._running.sequences[..., : self._length].flatten(0, 1)
            self._cache.extend(ids[:, -1:].tolist(), 1)

    @property
    def _new_tokens(self) -> int:
        return self._length - self._call.padded_len

    def _first_beams(self) -> Beams:
        """All beams of a prompt are equal, so that only the first may have candidates."""
        call, max_length = self._call, self._call.config.max_length
        ids = call.input_ids
        sequences = ids.new_full((self._num_prompts, self._num_beams, max_length), beam_fill_token(call))
        sequences[..., : call.padded_len] = ids.view(self._num_prompts, self._num_beams, -1)
        scores = torch.zeros(sequences.shape[:2], device=ids.device)
        scores[:, 1:] = IMPOSSIBLE
        origins = torch.full_like(sequences[..., call.padded_len :], -1, dtype=torch.int32)
        return Beams(sequences, scores, origins)

    def _log_probs(self, ids: torch.LongTensor) -> torch.Tensor:
        """[B * N, V] processed log-probabilities of the tokens behind `ids`, [B * N, L]."""
        logits = self._cache.logits(out=self._memory.logits)[:, -1].to(ids.device)
        if self._logits is not None:
            self._logits += (logits,)
        log_probs = torch.log_softmax(logits, dim=-1, out=self._memory.log_probs)
        processed = self._call.processors(ids, log_probs)
        if self._scores is not None:
            self._scores += (processed.clone() if self._memory.users_look else processed,)
        return processed

    def _candidates(self, log_probs: torch.Tensor) -> Beams:
        """The best continuations by one token, or some drawn by their scores, of each prompt."""
        sums = torch.add(log_probs, self._running.scores.view(-1, 1), out=self._memory.sums)
        scores, sequences, origins = self._model._get_top_k_continuations(
            accumulated_log_probs=sums.view(self._num_prompts, -1),
            running_sequences=self._running.sequences,
            running_beam_indices=self._running.origins,
            cur_len=self._length,
            decoder_prompt_len=self._call.padded_len,
            do_sample=self._call.config.do_sample,
            beams_to_keep=self._num_candidates,
            num_beams=self._num_beams,
            vocab_size=sums.shape[-1],
            batch_size=self._num_prompts,
        )
        return Beams(sequences, scores, origins)

    def _ended(self, candidates: Beams) -> torch.Tensor:
        """bool [B, candidates]: those that a stopping criterion ends."""
        ids = candidates.sequences[..., : self._length + 1].flatten(0, 1)
        return self._call.criteria(ids, self._scores).view(candidates.scores.shape)

    def _choose_running(self, candidates: Beams, ended: torch.Tensor) -> None:
        sequences, scores, origins = self._model._get_running_beams_for_next_iteration(
            topk_log_probs=candidates.scores,
            topk_running_sequences=candidates.sequences,
            topk_running_beam_indices=candidates.origins,
            next_token_hits_stopping_criteria=ended,
            num_beams=self._num_beams,
        )
        self._running = Beams(sequences, scores, origins)

    def _keep_finished(self, candidates: Beams, ended: torch.Tensor) -> None:
        config = self._call.config
        is_among_best = torch.arange(self._num_candidates, device=ended.device) < self._num_beams
        sequences, scores, origins, self._is_finished = self._model._update_finished_beams(
            sequences=self._finished.sequences,
            topk_running_sequences=candidates.sequences,
            beam_scores=self._finished.scores,
            topk_log_probs=candidates.scores,
            beam_indices=self._finished.origins,
            topk_running_beam_indices=candidates.origins,
            is_early_stop_heuristic_unsatisfied=self._can_improve,
            is_sent_finished=self._is_finished,
            next_token_hits_stopping_criteria=ended,
            top_num_beam_mask=is_among_best,
            num_beams=self._num_beams,
            cur_len=self._length,
            decoder_prompt_len=self._call.padded_len,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
        )
        self._finished = Beams(sequences, scores, origins)

    def _goes_on(self, ended: torch.Tensor) -> bool:
        config = self._call.config
        self._can_improve = self._model._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=self._can_improve,
            running_beam_scores=self._running.scores,
            beam_scores=self._finished.scores,
            is_sent_finished=self._is_finished,
            cur_len=self._length,
            max_length=config.max_length,
            decoder_prompt_len=self._call.padded_len,
            early_stopping=config.early_stopping,
            length_penalty=config.length_penalty,
        )
        return bool(
            self._model._beam_search_has_unfinished_sequences(
                self._can_improve, self._is_finished, ended, config.early_stopping
            )
        )

    def _output(self) -> torch.LongTensor | GenerateBeamDecoderOnlyOutput:
        """The best finished beams, as long as the longest of them."""
        config = self._call.config
        best = slice(config.num_return_sequences)
        origins = self._finished.origins[:, best].flatten(0, 1)
        new_tokens = int((origins >= 0).sum(-1).max())
        sequences = self._finished.sequences[:, best, : self._call.padded_len + new_tokens].flatten(0, 1)
        if not config.return_dict_in_generate:
            return sequences
        best_scores = self._finished.scores[:, best].flatten() if config.output_scores else None
        running = self._running.sequences[..., : self._length].flatten(0, 1)
        cache = returned_cache(self._model, running, self._call.attention_mask)
        return beam_output(sequences, best_scores, self._scores, self._logits, origins[:, :new_tokens], cache)
