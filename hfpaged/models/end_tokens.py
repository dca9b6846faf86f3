"""end_tokens: which tokens end a model's texts."""

from __future__ import annotations

from transformers import PreTrainedModel


def end_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids of the tokens that end a sequence, by the model's generation config; none if it has none."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)
