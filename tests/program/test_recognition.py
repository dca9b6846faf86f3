"""What recognition refuses, and that it leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from families import build_tiny
from torch import nn

from hfpaged.fusion.registry import FusionRegistry
from hfpaged.program.description import NotRecognized
from hfpaged.program.program import StepProgram


def refusal(model: nn.Module, **options: object) -> str:
    with pytest.raises(NotRecognized) as caught:
        StepProgram.build(model, num_threads=1, **options)
    return caught.value.reason


@pytest.mark.parametrize(
    "family, reason",
    [
        ("gpt2", "no output projection reads what attention returns"),
        ("gpt_oss", "other parameters or arguments than gated experts"),
        ("opt", "changes queries or keys in an unknown way"),
        ("deepseek_v3", "linear modules beside its query, key, value and output projections"),
        ("bloom", "none of its layers calls Transformers' attention interface"),
        ("mamba", "none of its layers calls Transformers' attention interface"),
        ("lfm2", "does not read what"),
    ],
)
def test_families_without_a_program_say_why(family, reason):
    assert reason in refusal(build_tiny(family))


class Doubled(nn.Module):
    """Stands in for a module whose results it doubles."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.inner(*args, **kwargs) * 2


class LinearSubclass(nn.Linear):
    """An nn.Linear that is not exactly one, as quantized and adapted ones are."""


@pytest.mark.parametrize("path", ["mlp", "mlp.act_fn", "self_attn.o_proj", "self_attn.q_proj", "input_layernorm"])
def test_a_module_that_computes_something_else_is_noticed(path):
    model = build_tiny("llama")
    parent = model.model.layers[2].get_submodule(path.rpartition(".")[0])
    name = path.rpartition(".")[2]
    setattr(parent, name, Doubled(getattr(parent, name)))
    assert "model.layers.2" in refusal(model)


@pytest.mark.parametrize("path", ["mlp.down_proj", "self_attn.v_proj"])
def test_a_subclass_of_linear_is_not_taken_for_one(path):
    model = build_tiny("llama")
    model.model.layers[1].get_submodule(path).__class__ = LinearSubclass
    assert "model.layers.1" in refusal(model)


def test_frequencies_that_depend_on_the_longest_sequence_are_refused():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "dynamic rotary embedding" in refusal(build_tiny("llama", rope_parameters=scaling))


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_frequencies_fixed_by_the_config_are_taken_from_the_model(rope_type):
    scaling = {
        "rope_type": rope_type,
        "factor": 4.0,
        "rope_theta": 10000.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    StepProgram.build(build_tiny("llama", rope_parameters=scaling), num_threads=1)


def test_a_norm_of_another_dtype_than_the_activations_is_refused():
    model = build_tiny("llama").to(torch.bfloat16)
    model.model.layers[1].input_layernorm.weight.data = torch.ones(64)
    # Its output is fp32: the projections after it do not even run.
    assert "forward failed" in refusal(model)


def test_modules_with_hooks_are_refused_and_counted():
    model, registry = build_tiny("llama"), FusionRegistry()
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, output: None)
    assert "hooks" in refusal(model, registry=registry)
    assert list(registry.refusals.values()) == [1]
    assert next(iter(registry.refusals))[0] == "linear_residual"


def test_a_model_with_not_finite_logits_is_refused():
    model = build_tiny("llama")
    model.model.embed_tokens.weight.data.fill_(float("nan"))
    assert "not finite" in refusal(model)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_building_leaves_no_trace_in_the_model(family):
    model = build_tiny(family)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    config = dict(vars(model.config))
    random_state = torch.random.get_rng_state()
    try:
        StepProgram.build(model, num_threads=1)
    except NotRecognized:
        assert family == "gpt_oss"
    assert dict(vars(model.config)) == config
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_hooks_with_kwargs for module in model.modules())
