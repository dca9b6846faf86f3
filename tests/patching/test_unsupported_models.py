"""Models that the engine cannot run are refused with reasons, and stay as they were."""

from __future__ import annotations

import pytest
from accelerate import cpu_offload, dispatch_model, init_empty_weights
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from families import build_tiny
from oracle import greedy
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
)

import hfpaged
from hfpaged.errors import UnsupportedModelError

SMALL_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
SMALL_BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64, "encoder_attention_heads": 2}
SMALL_BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}

REFUSED = {
    "bloom": (lambda: build_tiny("bloom"), "position_ids"),
    "falcon": (lambda: build_tiny("falcon"), "attention interface"),
    "mamba": (lambda: build_tiny("mamba"), "recurrent state"),
    "lfm2": (lambda: build_tiny("lfm2"), "layers of type conv"),
    "llama4": (lambda: build_tiny("llama4_text"), "layers of type chunked_attention"),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(**SMALL_T5)), "encoder-decoder"),
    "bart": (lambda: BartForConditionalGeneration(BartConfig(**SMALL_BART)), "encoder-decoder"),
    "bert": (lambda: BertModel(BertConfig(**SMALL_BERT)), "no generate"),
}


def assert_refused(model, reason):
    attributes, cls = dict(vars(model)), type(model)
    reasons = hfpaged.support(model)
    assert any(reason in one for one in reasons), reasons
    with pytest.raises(UnsupportedModelError) as caught:
        model.patch()
    assert caught.value.reasons == reasons
    assert type(model) is cls and vars(model) == attributes


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_architecture(make, reason):
    assert_refused(make(), reason)


def test_weights_on_the_meta_device(model):
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(model.config)
    assert_refused(empty, "meta device")


def test_offloaded_weights(model):
    want = greedy(model)
    cpu_offload(model, execution_device="cpu")
    assert_refused(model, "Accelerate's hooks are on the model")
    assert greedy(model) == want


def test_a_device_map_over_several_places(model, tmp_path):
    want = greedy(model)
    places = {name: "cpu" for name in ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")}
    layers = {f"model.layers.{index}": "disk" if index else "cpu" for index in range(len(model.model.layers))}
    dispatch_model(model, {**places, **layers}, offload_dir=tmp_path)
    assert_refused(model, "which is spread over cpu and disk")
    assert greedy(model) == want


def test_a_device_map_of_one_device_is_no_reason(model):
    dispatch_model(model, {"": "cpu"})
    assert hfpaged.support(model) == []


def test_forward_replaced_on_a_submodule(model):
    add_hook_to_module(model.model.layers[1].mlp, ModelHook())
    assert_refused(model, "Accelerate's hooks are on model.layers.1.mlp")
    remove_hook_from_module(model.model.layers[1].mlp)
    model.model.layers[1].mlp.forward = lambda x: x
    assert_refused(model, "forward of model.layers.1.mlp was replaced")


def test_generate_replaced_on_the_instance(model):
    model.generate = lambda *args, **kwargs: None
    assert_refused(model, "generate of the model was replaced")


def test_generate_of_its_own():
    class Own(type(build_tiny("llama", num_hidden_layers=1))):
        def generate(self, *args, **kwargs):
            return "own"

    assert_refused(Own(build_tiny("llama", num_hidden_layers=1).config), "its own generate()")


def test_weights_on_two_devices(model):
    model.lm_head.to("meta")
    assert_refused(model, "meta device")


def test_a_config_that_refuses_our_attention(model):
    class Stubborn(type(model.config)):
        @property
        def _attn_implementation(self):
            return "eager"

        @_attn_implementation.setter
        def _attn_implementation(self, value):
            pass

    model.config.__class__ = Stubborn
    with pytest.raises(UnsupportedModelError, match="refuses the attention implementation"):
        model.patch()
    assert "_hfpaged" not in vars(model)


def test_forward_replaced_after_patching(model):
    texts = greedy(model.patch())
    layer = model.model.layers[1].mlp
    add_hook_to_module(layer, ModelHook())
    assert greedy(model) == texts
    assert hfpaged.engine(model).stats()["fallbacks"] == {"forward replaced": 1}
    remove_hook_from_module(layer)
    assert "forward" in vars(layer)
    assert greedy(model) == texts
    assert hfpaged.support(model) == []
