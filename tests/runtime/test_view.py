"""The engine view: what the twin shares with the live model, what it does not, and when it must be made anew."""

from __future__ import annotations

import copy
import types
import weakref

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from families import FAMILIES, build_tiny
from torch import nn

from hfpaged.compat import ATTENTION_NAME
from hfpaged.errors import UnsupportedModelError
from hfpaged.runtime.module_state import walk_modules
from hfpaged.runtime.view import EngineView

SUPPORTED = sorted(set(FAMILIES) - {"bloom", "falcon", "lfm2", "llama4_text", "mamba"})


@pytest.fixture
def model():
    return build_tiny("llama", num_hidden_layers=2)


@pytest.fixture
def view(model):
    return EngineView(model, type(model))


def named_pairs(model, twin):
    twins = dict(twin.named_modules(remove_duplicate=False))
    return [(name, module, twins[name]) for name, module in model.named_modules(remove_duplicate=False)]


@pytest.mark.parametrize("family", SUPPORTED)
def test_twin_shares_weights_and_nothing_that_runs(family):
    model = build_tiny(family, num_hidden_layers=2)
    twin = EngineView(model, type(model)).model
    live = {id(module) for module in model.modules()}
    for _, module, other in named_pairs(model, twin):
        assert type(other) is type(module) and other is not module
        assert other._parameters is module._parameters and other._buffers is module._buffers
        assert not other.training
        assert not any(id(reached) in live for reached in reachable_modules(other))
    assert twin.config is not model.config
    assert twin.config._attn_implementation == ATTENTION_NAME
    assert model.config._attn_implementation == "eager"


def reachable_modules(module):
    """Modules that plain attributes refer to, in containers and as the owners of bound methods too."""
    left = [value for name, value in vars(module).items() if name not in vars(nn.Module())]
    while left:
        value = left.pop()
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, types.MethodType):
            left.append(value.__self__)
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, (list, tuple, set)):
            left += value


@pytest.mark.parametrize("family", SUPPORTED)
def test_one_copy_of_each_config(family):
    model = build_tiny(family, num_hidden_layers=2)
    twin = EngineView(model, type(model)).model
    copies = {}
    for _, module, other in named_pairs(model, twin):
        if hasattr(module, "config"):
            assert copies.setdefault(id(module.config), other.config) is other.config


def test_shared_modules_stay_shared(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp
    twin = EngineView(model, type(model)).model
    assert twin.model.layers[1].mlp is twin.model.layers[0].mlp


def test_twin_has_no_hooks(model):
    model.lm_head.register_forward_hook(lambda *args: pytest.fail("a hook of the live model ran"))
    twin = EngineView(model, type(model)).model
    assert not twin.lm_head._forward_hooks
    twin.lm_head(torch.zeros(1, 64))
    twin.lm_head.register_forward_hook(lambda *args: None)
    assert len(model.lm_head._forward_hooks) == 1


def test_building_leaves_the_live_model_alone(model):
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    config = copy.deepcopy(model.config.to_dict())
    EngineView(model, type(model))
    assert {name: vars(module) for name, module in model.named_modules()} == before
    assert model.config.to_dict() == config


def test_view_does_not_keep_the_model_alive():
    model = build_tiny("llama", num_hidden_layers=1)
    view, gone = EngineView(model, type(model)), weakref.ref(model)
    del model
    assert gone() is None and view.model.lm_head is not None


# ---- what makes it stale ----


def replace_module(model):
    model.lm_head = nn.Linear(64, 128, bias=False)


def add_module(model):
    model.model.layers[0].mlp.extra = nn.Identity()


def remove_module(model):
    del model.model.layers[1]


def exchange_modules(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def change_number(model):
    model.model.layers[0].self_attn.scaling = 0.5


def add_attribute(model):
    model.model.layers[0].self_attn.extra = 1


def remove_attribute(model):
    del model.model.layers[0].self_attn.is_causal


def change_item_of_a_list(model):
    model.lm_head.merged_adapters[:] = ["a"]


def change_nested_item(model):
    model.lm_head.scaling["a"]["b"] = 2.0


def change_class(model):
    model.model.layers[0].mlp.__class__ = type("Other", (type(model.model.layers[0].mlp),), {})


def change_config(model):
    model.config.rms_norm_eps = 0.1


def change_config_in_depth(model):
    model.config.rope_parameters["rope_theta"] = 1.0


def replace_config(model):
    model.model.config = copy.deepcopy(model.config)


def change_dtype(model):
    model.to(torch.bfloat16)


def change_dtype_of_one(model):
    model.lm_head.weight.data = model.lm_head.weight.data.double()


def change_device(model):
    model.lm_head.to("meta")


def change_shape(model):
    model.lm_head.weight.data = torch.zeros(64, 64)


STALE = (
    replace_module,
    add_module,
    remove_module,
    exchange_modules,
    change_number,
    add_attribute,
    remove_attribute,
    change_item_of_a_list,
    change_nested_item,
    change_class,
    change_config,
    change_config_in_depth,
    replace_config,
    change_dtype,
    change_dtype_of_one,
    change_device,
    change_shape,
)


@pytest.mark.parametrize("change", STALE, ids=lambda change: change.__name__)
def test_stale_after(model, change):
    model.lm_head.merged_adapters, model.lm_head.scaling = [], {"a": {"b": 1.0}}
    view = EngineView(model, type(model))
    twin, step = view.model, view.step
    assert not view.is_stale(model) and not view.refresh(model)
    assert view.model is twin
    change(model)
    assert view.is_stale(model)
    assert view.refresh(model)
    assert view.model is not twin and view.step is not step
    assert not view.is_stale(model)
    assert len(walk_modules(view.model)) == len(walk_modules(model))


# ---- and what does not ----


def run_backward(model):
    ids = torch.tensor([[3, 4, 5]])
    model(input_ids=ids, labels=ids, output_hidden_states=True).loss.backward()
    torch.optim.AdamW(model.parameters()).step()


def add_hooks(model):
    model.lm_head.register_forward_hook(lambda *args: None)
    model.lm_head.weight.register_hook(lambda gradient: gradient)


def load_weights(model):
    model.load_state_dict({name: -tensor for name, tensor in model.state_dict().items()}, assign=True)


FRESH = {
    "train": lambda model: model.train(),
    "freeze": lambda model: model.requires_grad_(False),
    "backward": run_backward,
    "hooks": add_hooks,
    "weights": load_weights,
    "compile": lambda model: model.compile(),
    "checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "generate": lambda model: model.generate(torch.tensor([[3, 4]]), max_new_tokens=2),
    "generation config": lambda model: setattr(model, "generation_config", None),
    "buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 2),
}


@pytest.mark.parametrize("change", FRESH.values(), ids=FRESH)
def test_not_stale_after(model, view, change):
    change(model)
    assert not view.is_stale(model)
    for _, module, twin in named_pairs(model, view.model):
        assert all(one is other for one, other in zip(module.parameters(), twin.parameters(), strict=True))
        assert all(one is other for one, other in zip(module.buffers(), twin.buffers(), strict=True))


def test_a_module_at_the_address_of_its_predecessor(model):
    """An id may come back; a module does not."""
    view = EngineView(model, type(model))
    for _ in range(20):
        del model.lm_head
        model.lm_head = nn.Linear(64, 128, bias=False)
        assert view.refresh(model)
        assert view.model.lm_head.weight is model.lm_head.weight


def test_own_forward_has_no_twin(model, view):
    add_hook_to_module(model.model.layers[0].mlp, ModelHook())
    twin = view.model
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="forward of LlamaMLP"):
            view.refresh(model)
    assert view.model is twin
    remove_hook_from_module(model.model.layers[0].mlp)
    assert view.refresh(model)
    assert "forward" not in vars(view.model.model.layers[0].mlp)
