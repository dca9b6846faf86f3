"""From a padded batch to requests: each row becomes what Transformers would make of that prompt alone."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from hfpaged.errors import InputError, UnsupportedOptionError
from hfpaged.generation.adapters import row_adapters
from hfpaged.generation.call import GenerateCall
from hfpaged.generation.request_options import RequestOptions
from hfpaged.runtime.request_spec import DraftOptions, LookupOptions, RequestSpec
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.sampling.additive import AdditivePenalty, LogitBias
from hfpaged.sampling.processors import CompiledProcessors
from hfpaged.sampling.stages import RowStage
from hfpaged.sampling.stop import StopRule

MakeProcessors = Callable[..., LogitsProcessorList]


def mask_is_left_padding(mask: torch.Tensor) -> bool:
    """Whether every row of a [B, L] mask is zeros, then ones up to its end."""
    ones = mask != 0
    return bool(ones[:, -1].all() and (ones[:, 1:] >= ones[:, :-1]).all())


def require_no_empty_row(mask: torch.Tensor) -> None:
    """Raise `InputError` if a row of a [B, L] mask has no token at all."""
    empty = (mask == 0).all(-1).nonzero()[:, 0].tolist()
    if empty:
        raise InputError(f"row {empty[0]} has no tokens (its attention mask is all zero)")


def token_ids(prompt: Iterable[Any]) -> list[int]:
    """A prompt from whatever holds integers: a list, a NumPy array, a [L] tensor.

    Raises:
        InputError: something in it is not an integer.
    """
    try:
        return list(map(int, map(operator.index, prompt)))
    except TypeError as error:
        raise InputError(f"a prompt is a sequence of integer token ids: {error}") from None


def unpadded(input_ids: torch.LongTensor, mask: torch.Tensor | None, vocab_size: int) -> list[list[int]]:
    """Token ids of each row without its left padding.

    Raises:
        InputError: no prompt or an empty one, ids that are no integers or outside the vocabulary, a mask of another
            shape, or a row that is all padding.
    """
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise InputError(f"a prompt needs at least one token; input_ids has shape {tuple(input_ids.shape)}")
    if input_ids.is_floating_point():
        raise InputError(f"input_ids must be integers, not {input_ids.dtype}")
    if mask is not None and mask.shape != input_ids.shape:
        raise InputError(f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}")
    if mask is not None:
        require_no_empty_row(mask)
    lengths = [input_ids.shape[1]] * input_ids.shape[0] if mask is None else (mask != 0).sum(-1).tolist()
    rows = [row[len(row) - length :] for row, length in zip(input_ids.tolist(), lengths, strict=True)]
    for index, row in enumerate(rows):
        check_prompt(row, vocab_size, f"row {index}")
    return rows


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many token ids the model can read."""
    embeddings = model.get_input_embeddings()
    # One with an adapter around it has only the weight.
    return getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0]


def check_prompt(prompt: list[int], vocab_size: int, name: str = "the prompt") -> None:
    """Raise `InputError` unless `prompt` has at least one token, all of them in the vocabulary."""
    if not prompt:
        raise InputError(f"{name} has no tokens")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InputError(f"{name} has token id {wrong}, outside the vocabulary of {vocab_size}")


def output_size(model: PreTrainedModel) -> int:
    """How many token ids can come out of the model."""
    head = model.get_output_embeddings()
    return getattr(head, "out_features", None) or head.weight.shape[0]


def check_bias(logit_bias: dict[int, float] | None, model: PreTrainedModel) -> None:
    """Raise `InputError` unless the model can produce every token id that has a bias."""
    if logit_bias and max(logit_bias) >= output_size(model):
        raise InputError(f"logit_bias has token id {max(logit_bias)}, outside the vocabulary of {output_size(model)}")


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
            logprobs=call.options.logprobs,
            prompt_logprobs=call.options.prompt_logprobs,
            steered=steered,
            guesses=guesses,
            priority=call.options.priority,
            cache_salt=call.options.cache_salt,
            prefix_cache=call.options.prefix_cache,
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
