"""From finished requests back to what stock `generate` returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hfpaged.compat import decoder_only_output
from hfpaged.generation.call import GenerateCall
from hfpaged.generation.returned_cache import returned_cache
from hfpaged.runtime.handle import GenerationHandle


def padded_sequences(call: GenerateCall, handles: Sequence[GenerationHandle]) -> torch.LongTensor:
    """[B, L + steps]: the padded prompts, then each row's tokens, then pad up to the longest row."""
    steps = max(len(handle.tokens) for handle in handles)
    sequences = torch.full((call.num_rows, call.padded_len + steps), pad_token(call), dtype=torch.long)
    sequences[:, : call.padded_len] = call.input_ids
    for row, handle in enumerate(handles):
        sequences[row, call.padded_len : call.padded_len + len(handle.tokens)] = torch.tensor(handle.tokens)
    return sequences.to(call.input_ids.device)


def generate_output(
    model: PreTrainedModel, call: GenerateCall, handles: Sequence[GenerationHandle]
) -> torch.LongTensor | GenerateDecoderOnlyOutput:
    """The ids, or with `return_dict_in_generate` the output object with scores and logits if asked for."""
    sequences = padded_sequences(call, handles)
    if not call.config.return_dict_in_generate:
        return sequences
    scores = _by_step(call, [handle.scores for handle in handles]) if call.keeps_scores else None
    logits = _by_step(call, [handle.logits for handle in handles]) if call.keeps_logits else None
    return decoder_only_output(sequences, scores, logits, returned_cache(model, sequences, call.attention_mask))


def pad_token(call: GenerateCall) -> int:
    """Id that fills a row after its end."""
    pad = call.config._pad_token_tensor
    return 0 if pad is None else int(pad)


def num_end_tokens(call: GenerateCall) -> int:
    """How many tokens end a sequence."""
    end = call.config._eos_token_tensor
    return 0 if end is None else end.shape[0]


def beam_fill_token(call: GenerateCall) -> int:
    """Id that fills a beam after its end, as stock chooses it: a pad token of 0 counts as none."""
    if not num_end_tokens(call):
        return -1
    return pad_token(call) or int(call.config._eos_token_tensor[0])


def ended_row_scores(call: GenerateCall, like: torch.Tensor) -> torch.Tensor:
    """Scores of a row after its end: its only possible token is pad."""
    scores = torch.full_like(like, float("-inf"))
    scores[pad_token(call)] = 0.0
    return scores


def _by_step(call: GenerateCall, rows: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Per-row lists of [V] to a tuple over steps of [B, V]; ended rows hold -inf, and 0 at pad."""
    steps = max(len(row) for row in rows)
    ended = ended_row_scores(call, rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else ended for row in rows]) for step in range(steps))
