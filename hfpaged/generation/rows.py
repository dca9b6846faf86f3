"""From a padded batch to requests: each row becomes what Transformers would make of that prompt alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from hfpaged.errors import UnsupportedOptionError
from hfpaged.generation.adapters import row_adapters
from hfpaged.generation.call import GenerateCall
from hfpaged.generation.prompts import unpadded, vocabulary_size
from hfpaged.generation.request_options import RequestOptions
from hfpaged.runtime.request_spec import DraftOptions, LookupOptions, RequestSpec
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.sampling.additive import AdditivePenalty, LogitBias
from hfpaged.sampling.processors import CompiledProcessors
from hfpaged.sampling.stages import RowStage
from hfpaged.sampling.stop import StopRule

MakeProcessors = Callable[..., LogitsProcessorList]


def row_specs(
    model: PreTrainedModel,
    call: GenerateCall,
    make_processors: MakeProcessors,
    steered: bool = False,
    guesses: LookupOptions | DraftOptions | None = None,
) -> list[RequestSpec]:
    """One request a row, in order.

    Args:
        make_processors: Transformers' own `_get_logits_processor` of this model.
        steered: the caller will process logits and feed tokens itself.
        guesses: how to guess ahead, where what a row asks for allows it.
    """
    prompts = unpadded(call.input_ids, call.attention_mask, vocabulary_size(model))
    repeats = max(1, call.config.num_return_sequences or 1)
    keys = _random_keys(call, repeats)
    state = ThreadState.capture(model.device.type)
    adapters = row_adapters(model, call)
    return [
        RequestSpec(
            prompt=prompt,
            max_tokens=len(prompt) + call.max_new_tokens,
            stop=StopRule.from_criteria(call.criteria, len(prompt) + call.max_new_tokens),
            thread_state=state,
            processors=None if steered else _compiled(call, index, prompt, make_processors),
            do_sample=bool(call.config.do_sample),
            seed=keys[index][0],
            sample_index=keys[index][1],
            keep_scores=call.keeps_scores,
            keep_logits=call.keeps_logits,
            steered=steered,
            guesses=guesses,
            **call.options.of_all_rows(),
            adapter=None if adapters is None else adapters[index],
            fork_of=index - index % repeats if index % repeats else None,
        )
        for index, prompt in enumerate(prompts)
    ]


def row_processors(
    call: GenerateCall, row: int, prompt: list[int], make_processors: MakeProcessors
) -> LogitsProcessorList:
    """The list that Transformers would build for `prompt`, a row's, alone, in the order of the call's own list.

    What it builds for the padded batch carries the batch's width: minimum lengths, forced tokens at the end, and so
    on. Here `max_length` and `min_length` leave the row as many new tokens as they leave the batch.
    """
    if not call.processors:
        return LogitsProcessorList()
    config = copy.copy(call.config)
    shift = len(prompt) - call.padded_len
    config.max_length = call.config.max_length + shift
    if config.min_length:
        config.min_length = max(0, call.config.min_length + shift)
    ids = torch.tensor([prompt], device=call.input_ids.device)
    arguments = dict(call.processors.arguments)
    arguments.update(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=_given_prompt(call, row, len(prompt)),
        model_kwargs={"attention_mask": torch.ones_like(ids)},
    )
    return make_processors(**arguments)


def _given_prompt(call: GenerateCall, row: int, length: int) -> torch.LongTensor:
    """[1, length] ids of a row as `generate` was given them, before token healing."""
    given = call.processors.arguments["encoder_input_ids"]
    return given[row * len(given) // call.num_rows, -length:][None]


def _compiled(
    call: GenerateCall, row: int, prompt: list[int], make_processors: MakeProcessors
) -> CompiledProcessors | None:
    first = additive_stages(call.options, len(prompt))
    if not call.processors and not first:
        return None
    return CompiledProcessors(row_processors(call, row, prompt, make_processors), first)


def additive_stages(options: RequestOptions, prompt_len: int) -> list[RowStage]:
    """What the options add to the logits, before anything of Transformers' own."""
    stages: list[RowStage] = []
    if options.logit_bias:
        stages.append(LogitBias(tuple(options.logit_bias), tuple(options.logit_bias.values())))
    if options.presence_penalty or options.frequency_penalty:
        stages.append(AdditivePenalty(options.presence_penalty, options.frequency_penalty, prompt_len))
    return stages


def _random_keys(call: GenerateCall, repeats: int) -> list[tuple[int, int]]:
    """(seed, sample index) of each row. A list of seeds has one a prompt; a single seed tells rows apart by index."""
    seed = call.options.seed
    if isinstance(seed, list):
        if len(seed) * repeats != call.num_rows:
            raise UnsupportedOptionError(f"{len(seed)} seeds were given for {call.num_rows // repeats} prompts")
        return [(seed[index // repeats], index % repeats) for index in range(call.num_rows)]
    if seed is None:
        # One draw from PyTorch's global generator a call, so that `set_seed` and `manual_seed` reproduce it.
        seed = int(torch.randint(0, 1 << 62, ())) if call.config.do_sample else 0
    return [(seed, index) for index in range(call.num_rows)]
