"""Classifier-free guidance: its second forward, of the rows without their prompts, on the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel, UnbatchedClassifierFreeGuidanceLogitsProcessor

from hfpaged.generation.adapters import row_adapters
from hfpaged.generation.call import GenerateCall
from hfpaged.generation.paged_model import PagedModel
from hfpaged.runtime.engine import EngineCore


@contextmanager
def guided_by_engine(model: PreTrainedModel, engine: EngineCore, call: GenerateCall) -> Iterator[None]:
    """Meanwhile, guidance that Transformers made for this call asks a `PagedModel` instead of the model."""
    stand_ins = []
    try:
        for processor in call.processors:
            if _can_ask_engine(model, call, processor):
                stand_ins.append(_stand_in(model, engine, call, processor))
                processor.model = stand_ins[-1]
        yield
    finally:
        for stand_in in stand_ins:
            stand_in.paged_cache.close()


def _can_ask_engine(model: PreTrainedModel, call: GenerateCall, processor: object) -> bool:
    if type(processor) is not UnbatchedClassifierFreeGuidanceLogitsProcessor or processor.model is not model:
        return False
    if call.processors.is_users(processor):
        return False
    ids, mask = (processor.unconditional_context[name] for name in ("input_ids", "attention_mask"))
    # The positions that stock gives to the tokens of padded negative prompts count the padding.
    return (ids is None or len(ids) == call.num_rows) and (mask is None or bool(mask.all()))


def _stand_in(
    model: PreTrainedModel,
    engine: EngineCore,
    call: GenerateCall,
    processor: UnbatchedClassifierFreeGuidanceLogitsProcessor,
) -> PagedModel:
    ids = processor.unconditional_context["input_ids"]
    # Without a negative prompt the rows begin with the last token of the prompt.
    length = 1 if ids is None else ids.shape[1]
    max_length = length + call.max_new_tokens
    return PagedModel(model, engine, call.options, max_length, repeats=1, adapters=row_adapters(model, call))
