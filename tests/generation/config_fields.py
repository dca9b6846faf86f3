"""What each field of GenerationConfig, and each argument of generate(), does on the engine: one probe for every one.

`test_config_matrix.py` walks Transformers' own class and signature and demands a probe for whatever it finds there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from families import BOS, EOS
from generation.fakes import AllowedTokens, GlobalStreamer, StopOneRow
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    WatermarkingConfig,
)

Options = dict[str, Any]

# What a probe does to the text of the base call, and who runs it.
CHANGES, SILENT, STOCK, REFUSED = "changes the output", "changes nothing", "goes to stock", "stock raises"


@dataclass(frozen=True)
class Scene:
    """What a probe may build its options from.

    Attributes:
        prompts: token ids of equal length.
        texts: what the base call generates after them.
        assistant: a small model over the same vocabulary.
        end_tokens: some tokens of the texts, in their middle.
    """

    prompts: list[list[int]]
    texts: list[list[int]]
    tokenizer: PreTrainedTokenizerBase
    assistant: PreTrainedModel

    @property
    def end_tokens(self) -> list[int]:
        return [text[3 + 2 * row] for row, text in enumerate(self.texts)]


MakeOptions = Callable[[Scene], Options]


@dataclass(frozen=True)
class Probe:
    """A call that shows what a field does.

    Attributes:
        options: of `generate`; a function where they depend on the texts or keep state.
        kind: one of the four above.
        reason: why it changes nothing, or under which name it is counted in `stats()["fallbacks"]`.
        needs: options that the field means nothing without; part of the base call that it is compared with.
        is_mode: it decides how the whole call is decoded.
    """

    options: Options | MakeOptions
    kind: str = CHANGES
    reason: str = ""
    needs: Options | MakeOptions = field(default_factory=dict)
    is_mode: bool = False


def made(options: Options | MakeOptions, scene: Scene) -> Options:
    """Options for one call."""
    return dict(options(scene) if callable(options) else options)


class Penalize(LogitsProcessor):
    """A user's processor."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] -= 3.0
        return scores


def one_token(model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """A decoding loop of the user's own."""
    return torch.cat([input_ids, model(input_ids).logits[:, -1:].argmin(-1)], dim=1)


def silent(options: Options, reason: str, needs: Options | None = None) -> Probe:
    return Probe(options, SILENT, reason, needs or {})


def stock(options: Options, reason: str, needs: Options | None = None) -> Probe:
    return Probe(options, STOCK, reason, needs or {}, is_mode=True)


def refused(options: Options, reason: str, needs: Options | None = None) -> Probe:
    return Probe(options, REFUSED, reason, needs or {}, is_mode=True)


SAMPLE = {"do_sample": True, "top_k": 0}
BEAMS = {"num_beams": 3}
DICT = {"return_dict_in_generate": True}


def ends(scene: Scene) -> Options:
    return {"eos_token_id": scene.end_tokens}


def beams_that_end(scene: Scene) -> Options:
    return {**BEAMS, **ends(scene)}


def prompted(prompts: list[list[int]]) -> Options:
    """These prompts, instead of the test's."""
    ids = torch.tensor(prompts)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def favour_the_prompt(scene: Scene) -> Options:
    return {"sequence_bias": {(token,): 4.0 for token in scene.prompts[0][:3]}}


def extensible_tokenizer() -> PreTrainedTokenizerFast:
    """Texts become single characters, which are the beginnings of other tokens."""
    characters = [chr(code) for code in range(ord("0"), ord("0") + 60)]
    longer = [character + "x" for character in characters]
    tokens = ["<pad>", "<s>", "</s>", *characters, *longer]
    backend = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer = Split("", "isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def tokens_of(scene: Scene, *places: int) -> list[int]:
    """Tokens at these places of each text."""
    return [text[place] for text in scene.texts for place in places]


FIELDS: dict[str, Probe] = {
    "max_length": Probe({"max_length": 15, "max_new_tokens": None}),
    "max_new_tokens": Probe({"max_new_tokens": 4}),
    "min_length": Probe({"min_length": 16}, needs=ends),
    "min_new_tokens": Probe({"min_new_tokens": 6}, needs=ends),
    "early_stopping": Probe(
        {"early_stopping": True}, needs=lambda scene: {**beams_that_end(scene), "length_penalty": 3.0}
    ),
    "max_time": Probe({"max_time": 0.0}),
    "stop_strings": Probe(
        lambda scene: {"stop_strings": scene.tokenizer.decode(scene.texts[0][2:4]), "tokenizer": scene.tokenizer}
    ),
    "do_sample": Probe({"do_sample": True, "top_k": 1, "output_scores": True}, needs=DICT),
    "num_beams": Probe(BEAMS, is_mode=True),
    "use_cache": stock({"use_cache": False}, "use_cache=False"),
    "cache_implementation": stock({"cache_implementation": "static"}, "cache_implementation"),
    "cache_config": silent({"cache_config": {"nbits": 4}}, "only other cache implementations read it"),
    "max_cache_len": silent({"max_cache_len": 64}, "the engine's cache grows with the text"),
    "temperature": Probe({"temperature": 0.6}, needs=SAMPLE),
    "top_k": Probe({"top_k": 5}, needs={"do_sample": True}),
    "top_p": Probe({"top_p": 0.7}, needs=SAMPLE),
    "min_p": Probe({"min_p": 0.2}, needs=SAMPLE),
    "top_h": Probe({"top_h": 0.4}, needs=SAMPLE),
    "typical_p": Probe({"typical_p": 0.6}, needs=SAMPLE),
    "epsilon_cutoff": Probe({"epsilon_cutoff": 0.01}, needs=SAMPLE),
    "eta_cutoff": Probe({"eta_cutoff": 0.05}, needs=SAMPLE),
    "renormalize_logits": Probe({"renormalize_logits": True}, needs={**SAMPLE, "temperature": 0.7}),
    "repetition_penalty": Probe({"repetition_penalty": 1.8}),
    "encoder_repetition_penalty": Probe({"encoder_repetition_penalty": 3.0}),
    "length_penalty": Probe({"length_penalty": -4.0}, needs=beams_that_end),
    "no_repeat_ngram_size": Probe({"no_repeat_ngram_size": 1}),
    "encoder_no_repeat_ngram_size": Probe({"encoder_no_repeat_ngram_size": 1}, needs=favour_the_prompt),
    "bad_words_ids": Probe(lambda scene: {"bad_words_ids": [[token] for token in tokens_of(scene, 1)]}),
    "forced_bos_token_id": Probe({"forced_bos_token_id": 9}, needs=lambda scene: prompted([[BOS]])),
    "forced_eos_token_id": Probe({"forced_eos_token_id": EOS}),
    "remove_invalid_values": Probe({"remove_invalid_values": True, "output_scores": True}, needs=DICT),
    "exponential_decay_length_penalty": Probe(
        {"exponential_decay_length_penalty": (2, 4.0)}, needs={"eos_token_id": EOS}
    ),
    "suppress_tokens": Probe(lambda scene: {"suppress_tokens": tokens_of(scene, 2)}),
    "begin_suppress_tokens": Probe(lambda scene: {"begin_suppress_tokens": tokens_of(scene, 0)}),
    "sequence_bias": Probe(lambda scene: {"sequence_bias": {(token,): -6.0 for token in tokens_of(scene, 4)}}),
    "token_healing": Probe(
        {"token_healing": True, "tokenizer": extensible_tokenizer()},
        needs=lambda scene: prompted([[9, 20, 33, 47, 24]]),
        is_mode=True,
    ),
    "guidance_scale": Probe({"guidance_scale": 2.5}),
    "watermarking_config": Probe({"watermarking_config": WatermarkingConfig(bias=6.0)}),
    "num_return_sequences": Probe({"num_return_sequences": 2}, needs={"do_sample": True, "top_k": 1}),
    "output_attentions": stock({"output_attentions": True}, "attentions or hidden states", DICT),
    "output_hidden_states": stock({"output_hidden_states": True}, "attentions or hidden states", DICT),
    "output_scores": Probe({"output_scores": True}, needs=DICT),
    "output_logits": Probe({"output_logits": True}, needs={**DICT, "suppress_tokens": [31]}),
    "return_dict_in_generate": Probe({"return_dict_in_generate": True}),
    "pad_token_id": Probe({"pad_token_id": 7}, needs=lambda scene: {**ends(scene), **prompted(scene.prompts)}),
    "bos_token_id": silent({"bos_token_id": 5}, "prompts are given"),
    "eos_token_id": Probe(ends),
    "decoder_start_token_id": silent({"decoder_start_token_id": 5}, "for encoder-decoders"),
    "is_assistant": stock({"is_assistant": True}, "assistant model", {**DICT, "output_scores": True}),
    "num_assistant_tokens": silent({"num_assistant_tokens": 3}, "read from the config of the assistant"),
    "num_assistant_tokens_schedule": silent({"num_assistant_tokens_schedule": "heuristic"}, "as above"),
    "assistant_confidence_threshold": silent({"assistant_confidence_threshold": 0.9}, "as above"),
    "prompt_lookup_num_tokens": silent({"prompt_lookup_num_tokens": 4}, "speculation changes no text"),
    "max_matching_ngram_size": silent(
        {"max_matching_ngram_size": 3}, "speculation changes no text", {"prompt_lookup_num_tokens": 4}
    ),
    "assistant_early_exit": stock({"assistant_early_exit": 1}, "assistant_early_exit"),
    "assistant_lookbehind": silent({"assistant_lookbehind": 5}, "for assistants with another tokenizer"),
    "target_lookbehind": silent({"target_lookbehind": 5}, "for assistants with another tokenizer"),
    "assistant_ensemble_weight": silent({"assistant_ensemble_weight": 0.5}, "no assistant, no ensemble"),
    "speculation_type": silent({"speculation_type": "dflash"}, "read only with an assistant"),
    "use_mtp": refused({"use_mtp": True}, "the model has no heads for it"),
    "compile_config": silent({"compile_config": None}, "speed of stock's forwards"),
    "disable_compile": silent({"disable_compile": True}, "speed of stock's forwards"),
    "prefill_chunk_size": silent({"prefill_chunk_size": 4}, "the engine chunks prompts itself"),
    "continuous_batching_config": silent({"continuous_batching_config": None}, "for stock's own engine"),
    "low_memory": silent({"low_memory": True}, "for contrastive search"),
    "penalty_alpha": refused({"penalty_alpha": 0.6}, "moved to a repository of remote code"),
    "dola_layers": refused({"dola_layers": "high"}, "moved to a repository of remote code"),
    "diversity_penalty": silent({"diversity_penalty": 0.5}, "for group beam search, which moved"),
    "num_beam_groups": refused({"num_beam_groups": 3}, "moved to a repository of remote code", BEAMS),
    "constraints": refused({"constraints": [object()]}, "moved to a repository of remote code", BEAMS),
    "force_words_ids": refused({"force_words_ids": [[5]]}, "moved to a repository of remote code", BEAMS),
    "transformers_version": silent({"transformers_version": "5.17.0"}, "a note in saved files"),
}

ARGUMENTS: dict[str, Probe] = {
    "inputs": Probe(
        lambda scene: {**prompted([scene.prompts[-1]]), "inputs": torch.tensor([scene.prompts[-1]]), "input_ids": None},
        is_mode=True,
    ),
    "generation_config": Probe({"generation_config": GenerationConfig(max_new_tokens=3), "max_new_tokens": None}),
    "logits_processor": Probe(lambda scene: {"logits_processor": [Penalize()]}),
    "stopping_criteria": Probe(lambda scene: {"stopping_criteria": [StopOneRow([3])]}),
    "prefix_allowed_tokens_fn": Probe(lambda scene: {"prefix_allowed_tokens_fn": AllowedTokens()}),
    "synced_gpus": silent({"synced_gpus": False}, "there is one process"),
    "assistant_model": Probe(lambda scene: {"assistant_model": scene.assistant}, SILENT, "speculation changes no text"),
    "streamer": Probe(lambda scene: {"streamer": GlobalStreamer()}, SILENT, "it only listens"),
    "negative_prompt_ids": Probe({"negative_prompt_ids": torch.tensor([[5, 6, 7]])}, needs={"guidance_scale": 2.5}),
    "negative_prompt_attention_mask": Probe(
        {"negative_prompt_attention_mask": torch.tensor([[0, 1, 1]])},
        needs={"guidance_scale": 2.5, "negative_prompt_ids": torch.tensor([[5, 6, 7]])},
    ),
    "custom_generate": Probe({"custom_generate": one_token}, is_mode=True),
}
