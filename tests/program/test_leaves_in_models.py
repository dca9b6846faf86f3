"""The tier of native leaves in whole models: stock's text, and what becomes of modules that cannot be leaves."""

from __future__ import annotations

from collections import Counter
from types import FunctionType, MethodType

import pytest
import torch
from batches import left_padded, random_prompts
from families import FAMILIES, build_tiny, build_uneven
from internals import workspace_of
from oracle import GREEDY, NEW, PROMPTS, assert_stock_text, greedy, stats, warm_up
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize

import hfpaged
from hfpaged.errors import ConfigError
from hfpaged.runtime.leaf_tier import LeafTier


def tier_of(model) -> LeafTier:
    tier = workspace_of(hfpaged.engine(model)).tier
    assert isinstance(tier, LeafTier)
    return tier


def native(model) -> Counter:
    """How many modules have a native forward, by kind."""
    return tier_of(model)._leaves.native


def places(model) -> list[str]:
    """Names of the modules of the engine's view that have a forward of their own."""
    view = hfpaged.engine(model)._stepper.workspaces._view.model
    return [name for name, module in view.named_modules() if "forward" in vars(module)]


SUPPORTED = [family for family in FAMILIES if not hfpaged.support(build_tiny(family))]


@pytest.mark.parametrize("family", SUPPORTED)
def test_fp32_text_is_stocks(family):
    model = build_uneven(family).patch(tier="leaves")
    assert_stock_text(model)
    assert stats(model)["tier"] == "leaves"
    assert len(places(model)) == native(model).total() > 0


# Decoders that are no step program, and some that are.
@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma3n_text", "deepseek_v3", "cohere2", "stablelm", "starcoder2"])
def test_fp32_text_is_the_same_alone_warm_and_in_chunks(family):
    model = build_uneven(family)
    with hfpaged.patched(model, tier="leaves"):
        expected = assert_stock_text(model)
        assert warm_up(model) == expected
        assert [greedy(model, [prompt])[0] for prompt in PROMPTS] == expected
    with hfpaged.patched(model, tier="leaves", max_batch_tokens=9):
        assert greedy(model) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "glm4", "gpt_neox", "exaone4", "olmo2"])
def test_whole_layers_are_native(family):
    model = build_uneven(family).patch(tier="leaves")
    greedy(model)
    assert native(model) == {"layer": 4, "norm": 1, "head": 1}
    assert stats(model)["tier_refusals"] == {}


@pytest.mark.parametrize(("family", "mlps"), [("mixtral", 0), ("gemma3n_text", 4)])
def test_of_other_layers_whole_parts_are_native(family, mlps):
    model = build_uneven(family).patch(tier="leaves")
    assert_stock_text(model)
    assert native(model)["layer"] == 0 and native(model)["mlp"] == mlps


class RepeatedMlp(nn.Module):
    """A decoder layer that recognition takes for the one inside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **kwargs):
        hidden = self.layer(hidden_states, **kwargs)
        return hidden + 1e-3 * hidden


def test_a_layer_that_adds_something_else_is_none():
    model = build_uneven("llama")
    model.model.layers[1] = RepeatedMlp(model.model.layers[1])
    model.patch(tier="leaves")
    assert_stock_text(model)
    assert native(model)["layer"] == 3 and native(model)["attention"] == native(model)["mlp"] == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_bf16_text_is_that_of_the_step_program(family):
    """Native layers run the operations of a step program, one layer at a time."""
    model = build_uneven(family, torch.bfloat16)
    texts = []
    for tier in ("program", "leaves"):
        with hfpaged.patched(model, tier=tier):
            texts.append(greedy(model))
    assert texts[0] == texts[1]


def test_what_is_no_known_layer_has_native_parts():
    model = build_uneven("opt").patch()
    greedy(model)
    assert stats(model)["tier"] == "leaves"
    assert native(model) == {"norm": 9, "head": 1, "linear": 4 * 6}
    (reason,) = stats(model)["tier_refusals"]
    assert reason.startswith("attention: model.decoder.layers.*.self_attn changes queries or keys in an unknown way")


def test_linear_modules_whose_weights_lie_transposed_are_native():
    model = build_uneven("gpt2").patch()
    assert_stock_text(model)
    assert native(model) == {"norm": 9, "head": 1, "linear": 4 * 4}


def test_auto_says_why_the_model_is_not_a_program():
    model = build_uneven("opt").patch()
    greedy(model)
    assert "changes queries or keys in an unknown way" in stats(model)["tier_reason"]
    model = build_uneven("llama").patch(tier="leaves")
    greedy(model)
    assert stats(model)["tier_reason"] == "it was asked for"


def test_it_needs_native_attention():
    model = build_uneven("llama").patch(tier="leaves", attention_backend="torch")
    with pytest.raises(ConfigError, match="tier='leaves' cannot run this model: the attention backend is torch"):
        hfpaged.engine(model).submit([5, 6, 7], max_new_tokens=1).result()


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "opt"])
def test_bf16_logits_have_the_same_bits_alone_in_a_batch_and_in_chunks(family):
    # A router's choice, which is stock's code here, may depend on the batch.
    fields = {"first_k_dense_replace": 4} if family == "deepseek_v3" else {}
    model = build_uneven(family, torch.bfloat16, **fields)
    prompts = random_prompts((37, 20, 5, 1, 29, 11, 2))

    def logits(*rows: list[int], chunk: int = 512) -> torch.Tensor:
        """[rows, NEW, vocab]"""
        with hfpaged.patched(model, tier="leaves", max_batch_tokens=chunk, prefix_caching=False):
            out = model.generate(
                **left_padded(rows), max_new_tokens=NEW, **GREEDY, output_logits=True, return_dict_in_generate=True
            )
        return torch.stack(out.logits, dim=1)

    alone = torch.cat([logits(prompt) for prompt in prompts])
    assert torch.equal(logits(*prompts), alone)
    assert torch.equal(logits(*prompts, chunk=9), alone)


class TestTheViewIsAllThatChanges:
    def test_while_it_runs(self):
        model = build_uneven("llama").patch(tier="leaves")
        greedy(model)
        assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
        assert nn.Linear.forward.__qualname__ == "Linear.forward"

    def test_and_not_for_longer_than_the_workspace(self):
        model = build_uneven("llama").patch(tier="leaves")
        texts = greedy(model)
        assert places(model)
        hfpaged.engine(model).release()
        assert not places(model)
        assert greedy(model) == texts and places(model)


# What these do shows in neither the activations nor the positions of the forward that recognition looks at.
HIDDEN_BEHAVIOUR = {
    "olmo": {"clip_qkv": 25.0},
    "ministral3": {
        "max_position_embeddings": 1 << 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 1 << 14,
        },
    },
}


@pytest.mark.parametrize("family", HIDDEN_BEHAVIOUR)
def test_an_attention_layer_that_does_more_than_was_recognized_runs_as_it_is(family, monkeypatch):
    monkeypatch.setitem(FAMILIES, family, HIDDEN_BEHAVIOUR[family])
    model = build_uneven(family).patch(tier="leaves")
    assert_stock_text(model)
    assert native(model)["attention"] == 0 and native(model)["linear"] == 4 * 4
    (reason,) = stats(model)["tier_refusals"]
    assert reason.endswith("Attention computes other numbers")


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class OddParameter(nn.Parameter):
    pass


def double_outputs(layer):
    layer.mlp.up_proj.__class__ = Doubled


def parametrize_weight(layer):
    parametrize.register_parametrization(layer.mlp.up_proj, "weight", nn.Tanh())


def wrap_weight(layer):
    layer.mlp.up_proj.weight = OddParameter(layer.mlp.up_proj.weight.detach())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (double_outputs, "linear: it is a Doubled"),
        (parametrize_weight, "linear: it is a ParametrizedLinear"),
        (wrap_weight, "linear: weight is a tensor subclass"),
    ],
)
def test_an_odd_linear_module_keeps_its_forward_and_the_others_are_leaves(change, reason):
    model = build_uneven("llama")
    change(model.model.layers[1])
    model.patch(tier="leaves")
    assert_stock_text(model)
    assert stats(model)["tier_refusals"][reason] == 1
    assert native(model)["layer"] == 3 and native(model)["attention"] == 1 and native(model)["linear"] == 2
    assert "model.layers.1.mlp.up_proj" not in places(model)


def rounding(self, x):
    return type(self).forward(self, (x * 8).round() / 8)


def adding_nothing(self, x):
    return type(self).forward(self, x)


@pytest.mark.parametrize(("forward", "layers"), [(rounding, 3), (adding_nothing, 4)])
def test_a_forward_that_a_library_wrapped_runs_unless_it_does_what_it_wraps(forward, layers):
    model = build_uneven("llama")
    module = model.model.layers[1].mlp.down_proj
    # The engine knows those of compressed-tensors by where they were written.
    written = FunctionType(forward.__code__, {"__name__": "compressed_tensors.quantization"})
    module.forward = MethodType(written, module)
    model.patch(tier="leaves")
    for _ in range(2):
        assert_stock_text(model)
        assert native(model)["layer"] == layers
        view = hfpaged.engine(model)._stepper.workspaces._view.model
        hfpaged.engine(model).release()
        assert view.model.layers[1].mlp.down_proj.forward.__func__ is written


def test_native_forwards_are_gone_after_a_release_whoever_still_looks_at_the_workspace():
    model = build_uneven("llama").patch(tier="leaves")
    engine = hfpaged.engine(model)
    for _ in range(2):
        assert_stock_text(model)
        looked_at = engine._stepper.workspaces.current  # as the statistics do, in another thread
        engine.release()
        assert places(model) == [] and not looked_at.scheduler.requests


def test_adapters_run_around_native_base_layers():
    peft_model = get_peft_model(build_uneven("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    hfpaged.patch(peft_model.eval(), tier="leaves")
    adapted = assert_stock_text(peft_model)
    model = peft_model.get_base_model()
    # q, k, v, o, gate, up and down, and two matrices for each of the three adapted ones.
    assert native(model)["linear"] == 4 * (7 + 6)
    assert "model.layers.0.self_attn.q_proj" not in places(model)
    assert "model.layers.0.self_attn.q_proj.base_layer" in places(model)
    with peft_model.disable_adapter():
        assert assert_stock_text(peft_model) != adapted
    peft_model.merge_adapter()
    assert_stock_text(peft_model)


class TestChangedWeights:
    def test_are_packed_again(self):
        model = build_uneven("gemma3_text").patch(tier="leaves")
        before = assert_stock_text(model)
        for parameter in model.parameters():
            parameter.data.mul_(0.7)
        assert assert_stock_text(model) != before
        assert native(model)["layer"] == 4

    def test_that_no_guard_admits_any_more_are_not(self):
        model = build_uneven("llama").patch(tier="leaves")
        assert_stock_text(model)
        wrap_weight(model.model.layers[2])
        with torch.no_grad():
            model.model.layers[2].mlp.up_proj.weight.mul_(-3)
        assert_stock_text(model)
        assert native(model)["layer"] == 3 and native(model)["attention"] == 1 and native(model)["mlp"] == 0
        assert stats(model)["tier_refusals"]["linear: weight is a tensor subclass"] == 1
