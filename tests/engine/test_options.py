"""Options of submitted prompts: merged once for all that share them, and anew whenever what they come from changed."""

from __future__ import annotations

import pytest
import torch
from engine.hooks import WAIT_SECONDS
from engine.one_prompt import PROMPT
from families import build_tiny
from transformers import GenerationConfig, GenerationMixin

from hfpaged.generation.prepared_configs import PreparedConfigs

DEVICE = torch.device("cpu")
SAMPLED = {"do_sample": True, "temperature": 0.5, "eos_token_id": 7}


@pytest.fixture
def merges(monkeypatch) -> list[dict]:
    """Options of each time that Transformers merged some."""
    merged = []
    prepare = GenerationMixin._prepare_generation_config

    def counted(self, generation_config, **options):
        merged.append(options)
        return prepare(self, generation_config, **options)

    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", counted)
    return merged


def test_prompts_with_the_same_options_share_one_merge_whatever_their_lengths(patched, merges):
    engine = patched().engine
    handles = [
        engine.submit(PROMPT[: 4 + length], max_new_tokens=length, do_sample=False, eos_token_id=-1)
        for length in range(1, 9)
    ]
    assert [len(handle.result(WAIT_SECONDS)) for handle in handles] == list(range(1, 9))
    assert len(merges) == 1


def set_default(model, given, options):
    model.generation_config.top_p = 0.5


def change_default_in_place(model, given, options):
    model.generation_config.suppress_tokens.append(9)


def replace_defaults(model, given, options):
    model.generation_config = GenerationConfig(top_k=3)


def change_given(model, given, options):
    given.min_p = 0.1


def change_option_in_place(model, given, options):
    options["bad_words_ids"][0].append(8)


def set_option_to_none(model, given, options):
    options["eos_token_id"] = None


def drop_option(model, given, options):
    del options["temperature"]


def change_length(model, given, options):
    options["max_new_tokens"] = 11


def drop_length(model, given, options):
    options["max_new_tokens"] = None


CHANGES = [
    set_default,
    change_default_in_place,
    replace_defaults,
    change_given,
    change_option_in_place,
    set_option_to_none,
    drop_option,
    change_length,
    drop_length,
]


@pytest.mark.parametrize("gives_config", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_followed(change, gives_config):
    model, prepared = build_tiny("llama"), PreparedConfigs()
    model.generation_config.suppress_tokens = [3]
    given, options = GenerationConfig(top_k=20) if gives_config else None, {**SAMPLED, "max_new_tokens": 5}
    options["bad_words_ids"] = [[5, 6]]
    before = prepared.config(model, given, options, DEVICE).to_dict()
    if change is change_given and not gives_config:
        given = GenerationConfig()
    change(model, given, options)
    after = prepared.config(model, given, options, DEVICE).to_dict()
    assert repr(after) == repr(PreparedConfigs().config(model, given, options, DEVICE).to_dict())
    assert repr(after) != repr(before)


def test_a_tensor_among_the_options_is_read_each_time():
    model, prepared, ends = build_tiny("llama"), PreparedConfigs(), torch.tensor([7])
    for token in (7, 8):
        ends[0] = token
        config = prepared.config(model, None, {"eos_token_id": ends}, DEVICE)
        assert config._eos_token_tensor.tolist() == [token]


def test_equal_numbers_of_other_types_are_other_options():
    model, prepared = build_tiny("llama"), PreparedConfigs()
    kinds = [
        type(prepared.config(model, None, {"do_sample": True, "temperature": one}, DEVICE).temperature)
        for one in (1.0, 1, 1.0)
    ]
    assert kinds == [float, int, float]


def test_what_transformers_refuses_it_refuses_every_time():
    model, prepared = build_tiny("llama"), PreparedConfigs()
    prepared.config(model, None, {"max_new_tokens": 4}, DEVICE)
    for _ in range(2):
        with pytest.raises(ValueError, match="max_new_tokens"):
            prepared.config(model, None, {"max_new_tokens": 0}, DEVICE)
    model.config.temperature = 0.3
    with pytest.raises(ValueError, match="modified the pretrained model configuration"):
        prepared.config(model, None, {"max_new_tokens": 4}, DEVICE)


def test_setting_attributes_of_one_config_changes_no_other():
    model, prepared = build_tiny("llama"), PreparedConfigs()
    prepared.config(model, None, {}, DEVICE).max_length = 3
    assert prepared.config(model, None, {}, DEVICE).max_length != 3
