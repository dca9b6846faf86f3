"""PagedGenerationMixin: put in front of a model's class by `patch`, it takes `generate`'s decoding loop to the engine.

Transformers does all preparation (config merging, lengths, expansion, processors, criteria) and then looks the
decoding method up on the class. Only those methods are overridden; whatever the engine does not take goes on to stock.
Around `generate` itself there is only care for who reads from the streamer of a call that fails, and for the adapters
that PEFT names in hooks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from hfpaged.compat import cache_field
from hfpaged.errors import NotPatchedError, UnsupportedOptionError
from hfpaged.generation.adapters import carry_names, row_adapters, rows_named
from hfpaged.generation.beam_search import BeamSearch
from hfpaged.generation.call import GenerateCall, PreparedCriteria, PreparedProcessors
from hfpaged.generation.engine import Engine
from hfpaged.generation.lockstep import LockstepLoop
from hfpaged.generation.outputs import generate_output
from hfpaged.generation.paged_model import PagedModel
from hfpaged.generation.readers import reader_released
from hfpaged.generation.request_options import RequestOptions
from hfpaged.generation.returned_cache import returned_cache
from hfpaged.generation.routing import beam_reason, loop_reason, stock_reason
from hfpaged.generation.rows import row_processors, row_specs
from hfpaged.generation.speculation import speculation_options
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.module_state import stocks
from hfpaged.runtime.request_spec import DraftOptions, LookupOptions

STATE_ATTRIBUTE = "_hfpaged"


class PagedGenerationMixin:
    """Overrides of `transformers.GenerationMixin`. Instances carry their engine in `_hfpaged`.

    `unpatch` may change the class of a model while one of these methods runs for it in another thread. So none of them
    looks another of these methods up on the model, or uses `super()`.
    """

    _hfpaged: Engine

    # Whoever compiles it, as in `model.generate = torch.compile(model.generate)`, compiles no more of it.
    @torch.compiler.disable
    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        generate = stocks(self, "generate")
        with reader_released(generate, args, kwargs), _adapters_of_call(self, kwargs):
            return generate(*args, **kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        model_kwargs.pop("hfpaged", None)
        stocks(self, "_validate_model_kwargs")(model_kwargs)

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        make = stocks(self, "_get_logits_processor")
        arguments = inspect.signature(make).bind(*args, **kwargs).arguments if args else kwargs
        return PreparedProcessors(make(**arguments), arguments)

    def _get_stopping_criteria(
        self,
        generation_config: GenerationConfig,
        stopping_criteria: StoppingCriteriaList | None,
        *args: Any,
        **kwargs: Any,
    ) -> StoppingCriteriaList:
        make = stocks(self, "_get_stopping_criteria")
        criteria = make(generation_config, stopping_criteria, *args, **kwargs)
        return PreparedCriteria(criteria, stopping_criteria)

    def _sample(
        self,
        input_ids: Any,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        arguments = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            "synced_gpus": synced_gpus,
            "streamer": streamer,
            **model_kwargs,
        }
        engine = _engine_for(self, arguments)
        call, reason = _routed(self, engine, input_ids, arguments)
        if reason is None:
            return _run_on_engine(self, engine, call)
        return _run_on_stock(self, "_sample", engine, call, arguments, reason)

    def _beam_search(self, input_ids: Any, **arguments: Any) -> Any:
        engine = _engine_for(self, arguments)
        call, reason = _routed(self, engine, input_ids, arguments)
        reason = reason or beam_reason(self, call)
        if reason is None:
            with _paged_rows(self, engine, call, repeats=call.config.num_beams) as paged:
                return BeamSearch(self, paged, call).run()
        return _run_on_stock(self, "_beam_search", engine, call, arguments, reason)

    def _assisted_decoding(self, input_ids: Any, **arguments: Any) -> Any:
        engine = _engine_for(self, arguments)
        call, reason = _routed(self, engine, input_ids, arguments)
        guesses = None
        if reason is None and not _needs_lockstep(call):
            guesses = speculation_options(self, call, arguments)
        if guesses is not None:
            return _run_on_engine(self, engine, call, guesses)
        reason = reason or loop_reason(self, call)
        if reason is None:
            return _run_assisted_loop(self, engine, call, arguments)
        return _run_on_stock(self, "_assisted_decoding", engine, call, arguments, reason)


@contextmanager
def _adapters_of_call(model: PreTrainedModel, kwargs: dict[str, Any]) -> Iterator[None]:
    """Put what PEFT has in hooks for this call among its options."""
    engine = vars(model).get(STATE_ATTRIBUTE)
    if engine is None:
        yield
        return
    with engine.hooked_names.claimed(model) as names:
        if names is not None and kwargs.get("custom_generate") is None:
            carry_names(kwargs, names)
        yield


def _engine_for(model: PreTrainedModel, arguments: dict[str, Any]) -> Engine | None:
    """The engine of a model; None where another thread has unpatched it since the call began.

    Raises:
        NotPatchedError: it was, and the call has options for the engine.
    """
    engine = vars(model).get(STATE_ATTRIBUTE)
    if engine is None and arguments.get("hfpaged"):
        raise NotPatchedError("the model was unpatched while this call began")
    return engine


def _routed(
    model: PreTrainedModel, engine: Engine | None, input_ids: Any, arguments: dict[str, Any]
) -> tuple[GenerateCall, str | None]:
    """The call in one object, and why stock must take it if it must. Takes `hfpaged` out of the arguments."""
    options = RequestOptions.from_keyword(arguments.pop("hfpaged", None))
    if options.for_submit:
        raise UnsupportedOptionError(
            f"{', '.join(options.for_submit)}: for engine.submit; generate has output_scores and output_logits for "
            "log-probabilities, and sequence_bias and logits_processor"
        )
    call, cache = GenerateCall.of_arguments(input_ids, arguments, options)
    return call, "unpatched" if engine is None else stock_reason(model, call, cache)


@contextmanager
def _paged_rows(model: PreTrainedModel, engine: Engine, call: GenerateCall, repeats: int) -> Iterator[PagedModel]:
    """Rows of the engine for a loop that runs on this thread, which are freed when it is left."""
    if call.options.seed is not None:
        raise UnsupportedOptionError(
            "hfpaged={'seed': ...} does not apply to beams and to Transformers' own assisted decoding, which draw from "
            "PyTorch's generator"
        )
    adapters = row_adapters(model, call)
    paged = PagedModel(model, engine, call.options, call.config.max_length, repeats, adapters)
    try:
        yield paged
    finally:
        paged.paged_cache.close()


def _run_assisted_loop(model: PreTrainedModel, engine: Engine, call: GenerateCall, arguments: dict[str, Any]) -> Any:
    """Transformers' own assisted decoding with its forwards, and its cache, on the engine."""
    with _paged_rows(model, engine, call, repeats=1) as paged:
        arguments = {**arguments, cache_field(): paged.paged_cache}
        output = GenerationMixin._assisted_decoding(paged, call.input_ids, **arguments)
    if call.config.return_dict_in_generate:
        output[cache_field()] = returned_cache(model, output.sequences, call.attention_mask)
    return output


def _run_on_stock(
    model: PreTrainedModel,
    method: str,
    engine: Engine | None,
    call: GenerateCall,
    arguments: dict[str, Any],
    reason: str,
) -> Any:
    """Transformers' own decoding `method`, for this reason, unless the user prefers an error."""
    if engine is None:
        return stocks(model, method)(call.input_ids, **arguments)
    if engine.config.on_unsupported == "raise":
        raise UnsupportedOptionError(
            f"the engine does not take this call ({reason}) and on_unsupported='raise'; "
            "patch with on_unsupported='stock' to let Transformers run it"
        )
    if call.options.seed is not None:
        raise UnsupportedOptionError(
            f"hfpaged={{'seed': ...}} means nothing to Transformers' own code, which this call needs ({reason})"
        )
    engine.counters.fallbacks[reason] += 1
    with rows_named(model, call):
        return stocks(model, method)(call.input_ids, **arguments)


def _run_on_engine(
    model: PreTrainedModel,
    engine: Engine,
    call: GenerateCall,
    guesses: LookupOptions | DraftOptions | None = None,
) -> Any:
    make = stocks(model, "_get_logits_processor")
    if _needs_lockstep(call):
        specs = row_specs(model, call, make, steered=True)
        row_lists = [row_processors(call, row, spec.prompt, make) for row, spec in enumerate(specs)]
        return LockstepLoop(model, engine, call, specs, row_lists).run()
    handles = engine.submit_specs(row_specs(model, call, make, guesses=guesses))
    try:
        call.options.put_in_scope(handles)
        if call.streamer is not None:
            _stream(call, handles[0])
        for handle in handles:
            handle.result()
    finally:
        engine.cancel(handles)
    return generate_output(model, call, handles)


def _needs_lockstep(call: GenerateCall) -> bool:
    """Whether something in the call must see its whole batch at every step."""
    if call.criteria.users or call.processors.any_needs_batch:
        return True
    if call.num_rows == 1:
        return False
    # Without an end token, stock goes on with rows that another criterion ended until all have.
    ends_unevenly = not call.stops_at_eos and len(call.criteria) > 1
    return call.streamer is not None or ends_unevenly


def _stream(call: GenerateCall, handle: GenerationHandle) -> None:
    for token in handle:
        call.streamer.put(call.input_ids.new_tensor([token]).cpu())
    call.streamer.end()
