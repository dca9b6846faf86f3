"""What users do to a live model between two calls: the next text is that of a fresh model in the new state."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from families import build_tiny
from oracle import GREEDY, assert_stock_text, greedy, stats, warm_up
from torch import nn
from torch.nn.utils import parametrize

from hfpaged.errors import EngineReleasedError

CASTS = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
}


def fresh_text(model):
    """What a model in this state gives on an engine of its own: exact in low precision too."""
    return greedy(copy.deepcopy(model).patch())


@pytest.mark.parametrize("tier", ["auto", "modules"])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_cast_and_back(model, cast, tier):
    model.patch(tier=tier)
    warm_up(model)
    cast(model)
    assert warm_up(model) == fresh_text(model)
    model.float()
    assert_stock_text(model)


def test_resized_embeddings(model):
    warm_up(model.patch())
    model.resize_token_embeddings(160, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[150] = 9 * model.lm_head.weight[3]
    assert_stock_text(model)
    assert_stock_text(model, prompts=[[159, 5, 158]])
    model.resize_token_embeddings(128)
    assert_stock_text(model)


def test_gradient_checkpointing_keeps_caches(model):
    texts = warm_up(model.patch())
    changes = stats(model)["weight_changes"]
    for _ in range(2):
        model.gradient_checkpointing_enable()
        assert greedy(model) == texts
        model.gradient_checkpointing_disable()
        assert greedy(model) == texts
    assert stats(model)["weight_changes"] == changes


def test_train_and_eval_keep_caches(model):
    texts = warm_up(model.patch())
    changes = stats(model)["weight_changes"]
    assert greedy(model.train()) == texts and model.training
    assert greedy(model.eval()) == texts and not model.training
    assert stats(model)["weight_changes"] == changes


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_attention_on_the_live_model(model, implementation):
    warm_up(model.patch())
    model.set_attn_implementation(implementation)
    assert_stock_text(model)
    assert model.config._attn_implementation == implementation


def replace_head(model):
    model.lm_head = nn.Linear(64, 128, bias=True)


def replace_layer(model):
    model.model.layers[0] = build_tiny("llama", seed=5, num_hidden_layers=1).model.layers[0]


def drop_layer(model):
    del model.model.layers[1]


def swap_layers(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


def parametrize_projection(model):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())


def tie_the_head(model):
    model.lm_head.weight = model.model.embed_tokens.weight


STRUCTURES = (replace_head, replace_layer, drop_layer, swap_layers, parametrize_projection, tie_the_head)


@pytest.mark.parametrize("change", STRUCTURES, ids=lambda change: change.__name__)
def test_other_modules(model, change):
    before = warm_up(model.patch())
    change(model)
    assert assert_stock_text(model) != before


def scale_attention(model):
    model.model.layers[0].self_attn.scaling *= 3


def change_epsilon(model):
    model.model.norm.variance_epsilon = model.model.layers[0].input_layernorm.variance_epsilon = 30.0


def other_activation(model):
    model.model.layers[0].mlp.act_fn = nn.ReLU()


ATTRIBUTES = (scale_attention, change_epsilon, other_activation)


@pytest.mark.parametrize("change", ATTRIBUTES, ids=lambda change: change.__name__)
def test_other_attributes(model, change):
    before = warm_up(model.patch())
    change(model)
    assert assert_stock_text(model) != before


def test_edited_config():
    model = build_tiny("granite", num_hidden_layers=2).patch()
    warm_up(model)
    model.config.logits_scaling = 0.5
    assert_stock_text(model)
    model.config.rope_parameters["rope_theta"] = 1.0
    assert_stock_text(model)


def test_generation_config_keeps_caches(model):
    warm_up(model.patch())
    changes = stats(model)["weight_changes"]
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.repetition_penalty = 1.5
    texts = greedy(model)
    assert texts == greedy(copy.deepcopy(model))
    assert stats(model)["weight_changes"] == changes


def test_classes_that_change_under_the_model(model):
    """Libraries swap the class of a module in place."""

    class LouderMLP(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    warm_up(model.patch())
    model.model.layers[0].mlp.__class__ = LouderMLP
    assert_stock_text(model)


def test_calls_of_other_threads_while_the_model_is_patched_and_unpatched(model):
    ids = torch.tensor([[5, 6, 7, 8]])
    want = model.generate(ids, **GREEDY, max_new_tokens=6).tolist()
    done = threading.Event()

    def call(_):
        while not done.is_set():
            try:
                assert model.generate(ids, **GREEDY, max_new_tokens=6).tolist() == want
            except EngineReleasedError:
                pass  # it was running when its engine went

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(call, number) for number in range(3)]
        for _ in range(40):
            model.patch()
            time.sleep(0.01)
            model.unpatch()
        done.set()
        for one in running:
            one.result()
