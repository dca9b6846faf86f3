"""Engine: what `hfpaged.engine(model)` returns. Requests by token ids, without going through `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from hfpaged.config import EngineConfig
from hfpaged.errors import UnsupportedOptionError
from hfpaged.generation.adapters import HookedNames
from hfpaged.generation.call import GenerateCall
from hfpaged.generation.prepared_configs import PreparedConfigs
from hfpaged.generation.prompts import check_bias, check_prompt, token_ids, vocabulary_size
from hfpaged.generation.request_options import RequestOptions
from hfpaged.generation.routing import stock_reason
from hfpaged.generation.rows import row_specs
from hfpaged.runtime.engine import EngineCore
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.module_state import stocks


class Engine(EngineCore):
    """The engine of one patched model. All methods may be called from any thread."""

    def __init__(self, model: PreTrainedModel, original_class: type[PreTrainedModel], config: EngineConfig):
        super().__init__(model, original_class, config)
        self.hooked_names = HookedNames()
        self._prepared_configs = PreparedConfigs()

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
        prompt, row_options = token_ids(prompt_ids), RequestOptions.from_keyword(hfpaged)
        check_prompt(prompt, vocabulary_size(model))
        check_bias(row_options.logit_bias, model)
        ids = torch.tensor([prompt], device=model.device)
        config = self._prepared_configs.config(model, generation_config, options, ids.device)
        _resolve_lengths(model, ids, config, generation_config, options)
        call = _single_row_call(model, ids, config, tokenizer, row_options)
        _require_engine_takes(model, call)
        specs = row_specs(model, call, stocks(model, "_get_logits_processor"))
        handles = self.submit_specs(specs)
        call.options.put_in_scope(handles)
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


def _resolve_lengths(
    model: PreTrainedModel,
    ids: torch.LongTensor,
    config: GenerationConfig,
    generation_config: GenerationConfig | None,
    options: dict[str, Any],
) -> None:
    """Set the lengths in `config` as `generate` does for a prompt, [1, L].

    Args:
        generation_config, options: what `config` was merged from.
    """
    has_default_max_length = _is_default("max_length", model, generation_config, options)
    model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=has_default_max_length,
        has_default_min_length=_is_default("min_length", model, generation_config, options),
        model_input_name="input_ids",
        inputs_tensor=ids,
        input_ids_length=ids.shape[1],
    )
    model._validate_generated_length(config, ids.shape[1], has_default_max_length)


def _single_row_call(
    model: PreTrainedModel, ids: torch.LongTensor, config: GenerationConfig, tokenizer: Any, options: RequestOptions
) -> GenerateCall:
    """What `generate` would hand on for a prompt, [1, L], with that config."""
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=ids.shape[1],
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
        options=options,
    )


def _require_engine_takes(model: PreTrainedModel, call: GenerateCall) -> None:
    """Refuse what `generate` would leave to Transformers, or run on its caller's thread."""
    reason = stock_reason(model, call, None)
    if reason is None and call.processors.any_needs_batch:
        reason = "a processor that calls the model or keeps state"
    if reason is not None:
        raise UnsupportedOptionError(f"engine.submit does not take this request ({reason}); use generate()")


def _is_default(
    name: str, model: PreTrainedModel, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> bool:
    sources = (options.get(name), getattr(generation_config, name, None), getattr(model.generation_config, name))
    return all(value is None for value in sources)
