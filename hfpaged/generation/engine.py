"""Engine: what `hfpaged.engine(model)` returns. Requests by token ids, without going through `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from hfpaged.config import EngineConfig
from hfpaged.errors import UnsupportedOptionError
from hfpaged.generation.adapters import HookedNames
from hfpaged.generation.call import GenerateCall, RequestOptions
from hfpaged.generation.routing import stock_reason
from hfpaged.generation.rows import check_bias, check_prompt, row_specs, token_ids, vocabulary_size
from hfpaged.runtime.engine import EngineCore
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.module_state import stocks

ENGINE_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Engine(EngineCore):
    """The engine of one patched model. All methods may be called from any thread."""

    def __init__(self, model: PreTrainedModel, original_class: type[PreTrainedModel], config: EngineConfig):
        super().__init__(model, original_class, config)
        self.hooked_names = HookedNames()

    def submit(
        self,
        prompt_ids: Sequence[int],
        generation_config: GenerationConfig | None = None,
        *,
        tokenizer: Any = None,
        hfpaged: dict[str, Any] | None = None,
        **options: Any,
    ) -> GenerationHandle:
        """Queue one prompt and return at once.

        Args:
            prompt_ids: token ids, at least one: a list, an array or a [L] tensor.
            generation_config, options: as in `generate`; merged with the model's own in the same way.
            tokenizer: needed for `stop_strings` only.
            hfpaged: per-request options, the fields of `RequestOptions`.

        Returns:
            A handle: iterate over it for token ids, or call `result()` or `cancel()`.

        Raises:
            InputError, RequestTooLargeError, UnsupportedOptionError: nothing was queued.
        """
        model = self.live_model()
        call = _single_row_call(model, token_ids(prompt_ids), generation_config, tokenizer, hfpaged, options)
        _require_engine_takes(model, call)
        specs = row_specs(model, call, stocks(model, "_get_logits_processor"))
        handles = self.submit_specs(specs)
        if call.options.scope is not None:
            call.options.scope.add(handles)
        return handles[0]

    def warm_up(self) -> int:
        """Build the pool and compile the step before anybody waits for it.

        On a device that replays steps, those of all batch sizes up to `max_requests` are captured, with a progress bar;
        otherwise each is captured when it is first needed.

        Returns:
            How many steps were captured.
        """
        self.submit([0], max_new_tokens=1, do_sample=False, hfpaged={"prefix_cache": False}).result()
        return self.capture_ahead()


def _single_row_call(
    model: PreTrainedModel,
    prompt: list[int],
    generation_config: GenerationConfig | None,
    tokenizer: Any,
    request_options: dict[str, Any] | None,
    options: dict[str, Any],
) -> GenerateCall:
    """Prepare one prompt as `generate` does: merge configs, resolve lengths and special tokens, build the lists."""
    check_prompt(prompt, vocabulary_size(model))
    row_options = RequestOptions.from_keyword(request_options)
    check_bias(row_options.logit_bias, model)
    has_default_max_length = _is_default("max_length", model, generation_config, options)
    has_default_min_length = _is_default("min_length", model, generation_config, options)
    config, unknown = model._prepare_generation_config(generation_config, **options)
    if unknown:
        raise UnsupportedOptionError(f"engine.submit does not know {', '.join(sorted(unknown))}")
    if config.get_generation_mode() not in ENGINE_MODES or (config.num_return_sequences or 1) > 1:
        raise UnsupportedOptionError("engine.submit takes one greedy or sampled sequence; use generate() for others")
    ids = torch.tensor([prompt], device=model.device)
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=ids.device, batch_size=1)
    config = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=has_default_max_length,
        has_default_min_length=has_default_min_length,
        model_input_name="input_ids",
        inputs_tensor=ids,
        input_ids_length=len(prompt),
    )
    model._validate_generated_length(config, len(prompt), has_default_max_length)
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=ids,
        device=ids.device,
        model_kwargs={},
    )
    criteria = model._get_stopping_criteria(
        generation_config=config, stopping_criteria=StoppingCriteriaList(), tokenizer=tokenizer
    )
    return GenerateCall(
        input_ids=ids,
        attention_mask=None,
        processors=processors,
        criteria=criteria,
        config=config,
        streamer=None,
        options=row_options,
    )


def _require_engine_takes(model: PreTrainedModel, call: GenerateCall) -> None:
    """Refuse what `generate` would leave to Transformers, or run on its caller's thread."""
    reason = stock_reason(model, call, None)
    if reason is None and any(call.processors.is_users(index) for index in range(len(call.processors))):
        reason = "a processor that calls the model or keeps state"
    if reason is not None:
        raise UnsupportedOptionError(f"engine.submit does not take this request ({reason}); use generate()")


def _is_default(
    name: str, model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> bool:
    sources = (options.get(name), getattr(generation_config, name, None), getattr(model.generation_config, name))
    return all(value is None for value in sources)
