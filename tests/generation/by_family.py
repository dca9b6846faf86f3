"""The same calls on the families that Transformers tests most, stock and patched: which, and what both say.

What Transformers' `GenerationTesterMixin` checks, and which test of `test_modes_by_family.py` and
`test_inputs_by_family.py` checks it of a patched model:

    greedy, sample, beam_search, beam_sample ..._generate, ..._dict_output(s): mode_with_all_outputs
    ..._dict_outputs_use_cache: returned_cache_has_a_layer, attentions_and_hidden_states
    assisted_decoding_matches_greedy_search, assisted_decoding_sample: assistant, guesses_have_the_outputs
    prompt_lookup_decoding_matches_greedy_search: mode_with_all_outputs, guesses_have_the_outputs
    prompt_lookup_decoding_stops_at_eos: guesses_stop_at_an_end_token
    left_padding_compatibility: left_padding_changes_nothing, each_row_is_as_alone, without_a_mask
    generate_without_input_ids: without_ids_it_begins_with_the_bos_token
    generate_from_inputs_embeds, ..._with_static_cache: embeddings_instead_of_ids, lengths_count_embeddings
    generate_from_random_inputs_embeds: embeddings_of_no_tokens
    generate_continue_from_past_key_values: goes_on_from_the_returned_cache, goes_on_from_its_own_text
    generate_continue_from_inputs_embeds: goes_on_from_embeddings
    generate_with_static_cache, ..._quant_cache: cache_types_are_honoured, a_cache_that_cannot_be_made_here
    past_key_values_format: returned_cache_has_a_layer
    generate_compile_model_forward_fullgraph, generate_compilation_all_outputs: compiled_forward_without_graph_breaks,
        stocks_own_compilation, a_compiled_model, a_compiled_generate
    generate_methods_with_logits_to_keep: all_logits_or_the_last
    generate_with_and_without_position_ids: positions_of_the_users_own
    eager_matches_sdpa_generate: other_attention_code_gives_the_same_text
    inherits_generation_mixin, prepare_inputs_for_generation_kwargs_forwards: what_generate_inherits

In other dtypes: 16_bit_gives_tokens_of_its_dtype. Not here: several devices, encoder-decoders, flash attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from batches import Prompt, left_padded
from families import PAD
from generation.conftest import Pair
from transformers import PreTrainedModel

import hfpaged

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [20, 21, 22], [40 + index % 7 for index in range(19)]]
NEW = 12
OPTIONS = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}


def both(pair: Pair, prompts: list[Prompt] = PROMPTS, **options: Any) -> list[Any]:
    """Outputs of stock and of patched for the same call and seed."""
    outputs = []
    for model in pair:
        torch.manual_seed(3)
        outputs.append(model.generate(**left_padded(prompts), **{**OPTIONS, **options}))
    return outputs


def fallbacks_of(model: PreTrainedModel, call: Callable[[], Any]) -> dict[str, int]:
    """Which fallbacks `call` counted."""
    before = dict(hfpaged.engine(model).stats()["fallbacks"])
    call()
    after = hfpaged.engine(model).stats()["fallbacks"]
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
