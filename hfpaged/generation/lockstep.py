"""The lockstep loop: a call whose processors, criteria or streamer must see its whole batch at every step.

Constraint and stop libraries are programs over the batch: they keep state by row index, decode at the padded length,
or answer for all rows at once. So they get exactly the calls that stock makes, on the thread that called `generate`:
once a step, [B, L] padded ids and [B, V] fp32 scores in the original row order, ended rows padded. The forwards still
share the engine's steps with everybody else, and user code may block, raise or call the model again.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hfpaged.compat import decoder_only_output
from hfpaged.generation.call import GenerateCall
from hfpaged.generation.guidance import guided_by_engine
from hfpaged.generation.outputs import ended_row_scores, pad_token
from hfpaged.generation.returned_cache import returned_cache
from hfpaged.runtime.engine import EngineCore
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.request_spec import RequestSpec
from hfpaged.sampling.sampler import draw_from_scores


class LockstepLoop:
    """Runs one call to its end.

    Args:
        model: the patched model.
        engine: its engine, which `unpatch` may take away from it meanwhile.
        specs: the call's rows, steered.
        row_lists: for each row the list that Transformers builds for it alone; entries that see the whole batch are
            taken from the call's own list instead.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: EngineCore,
        call: GenerateCall,
        specs: list[RequestSpec],
        row_lists: list[LogitsProcessorList],
    ):
        self._model = model
        self._engine = engine
        self._call = call
        self._specs = specs
        self._row_lists = row_lists
        self._ids = call.input_ids
        self._unfinished = torch.ones(call.num_rows, dtype=torch.bool, device=call.input_ids.device)
        self._last_logits: torch.Tensor | None = None
        self._scores: tuple[torch.Tensor, ...] | None = () if call.keeps_scores else None
        self._logits: tuple[torch.Tensor, ...] | None = () if call.keeps_logits else None

    def run(self) -> torch.LongTensor | GenerateDecoderOnlyOutput:
        """Generate until the criteria say that every row is done; then, or when anything raises, free all rows."""
        handles = self._engine.submit_specs(self._specs)
        try:
            self._call.options.put_in_scope(handles)
            with guided_by_engine(self._model, self._engine, self._call):
                while self._unfinished.any():
                    self._one_step(handles)
        finally:
            self._engine.cancel(handles)
        if self._call.streamer is not None:
            self._call.streamer.end()
        if self._call.config.return_dict_in_generate:
            cache = returned_cache(self._model, self._ids, self._call.attention_mask)
            return decoder_only_output(self._ids, self._scores, self._logits, cache)
        return self._ids

    def _one_step(self, handles: list[GenerationHandle]) -> None:
        call = self._call
        logits = self._gather(handles)
        scores = self._processed(logits)
        if self._scores is not None:
            self._scores += (self._marking_ended(scores),)
        if self._logits is not None:
            self._logits += (self._marking_ended(logits),)
        tokens = self._draw(scores)
        if call.stops_at_eos:
            tokens = torch.where(self._unfinished, tokens, pad_token(call))
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=-1)
        was_running = self._running()
        self._unfinished = self._unfinished & ~call.criteria(self._ids, self._scores)
        if call.streamer is not None:
            call.streamer.put(tokens.cpu())
        self._feed(handles, tokens, was_running)

    def _running(self) -> torch.Tensor:
        """Rows that the engine still computes. Without an end token stock goes on with rows that a criterion ended."""
        return self._unfinished if self._call.stops_at_eos else torch.ones_like(self._unfinished)

    def _gather(self, handles: list[GenerationHandle]) -> torch.Tensor:
        """[B, V] fp32 raw logits of the step; an ended row keeps its last ones."""
        running = self._running().nonzero()[:, 0]
        taken = [handles[row].take_logits()[-1] for row in running.tolist()]
        logits = torch.stack(taken).to(self._ids.device)
        if len(running) < self._call.num_rows:
            logits = self._last_logits.index_copy(0, running, logits)
        self._last_logits = logits
        return self._last_logits

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        scores = logits.clone()
        for index, processor in enumerate(self._call.processors):
            if self._call.processors.needs_batch(processor):
                scores = processor(self._ids, scores)
                continue
            rows = [
                row_list[index](self._row_ids(row), scores[row : row + 1])
                for row, row_list in enumerate(self._row_lists)
            ]
            scores = torch.cat(rows)
        return scores

    def _marking_ended(self, scores: torch.Tensor) -> torch.Tensor:
        """[B, V] scores for the output: a row that had ended before this step can only be followed by pad."""
        ended = ~self._running()
        if not ended.any():
            return scores
        marked = scores.clone()
        marked[ended] = ended_row_scores(self._call, scores[0])
        return marked

    def _row_ids(self, row: int) -> torch.LongTensor:
        """[1, l] ids of a row without its left padding."""
        return self._ids[row : row + 1, self._call.padded_len - len(self._specs[row].prompt) :]

    def _draw(self, scores: torch.Tensor) -> torch.LongTensor:
        if not self._call.config.do_sample:
            return scores.argmax(-1)
        return draw_from_scores(
            scores,
            seeds=[spec.seed for spec in self._specs],
            sample_indices=[spec.sample_index for spec in self._specs],
            positions=[self._row_ids(row).shape[1] for row in range(len(self._specs))],
        )

    def _feed(self, handles: list[GenerationHandle], tokens: torch.LongTensor, was_running: torch.Tensor) -> None:
        running = self._running() & self._unfinished.any()
        self._engine.feed(
            [
                (handles[row], [token] if goes_on else None)
                for row, (token, was, goes_on) in enumerate(
                    zip(tokens.tolist(), was_running.tolist(), running.tolist(), strict=True)
                )
                if was
            ]
        )
