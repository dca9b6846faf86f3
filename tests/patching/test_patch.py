"""patch, unpatch and patched: what they change, and that it is only this."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
from families import build_tiny
from oracle import assert_stock_text, greedy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationMixin, LlamaForCausalLM, pipeline
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfpaged
from hfpaged.errors import AlreadyPatchedError, ConfigError, EngineReleasedError, NotPatchedError
from hfpaged.patched_model import is_patched


def test_the_class_passes_every_check_of_the_original(model):
    model.patch()
    assert isinstance(model, LlamaForCausalLM)
    patched_class = type(model)
    for name in ("__name__", "__module__", "__qualname__", "__doc__"):
        assert getattr(patched_class, name) == getattr(LlamaForCausalLM, name)
    assert inspect.getsourcefile(patched_class) == inspect.getsourcefile(LlamaForCausalLM)
    unpatched = build_tiny("llama", num_hidden_layers=1)
    for method in ("forward", "generate", "prepare_inputs_for_generation"):
        assert inspect.signature(getattr(model, method)) == inspect.signature(getattr(unpatched, method))
    assert model.__class__.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert model.can_generate()


def test_two_patched_models_have_the_same_class(model):
    assert type(model.patch()) is type(build_tiny("llama", num_hidden_layers=1).patch())


def test_unpatch_restores_class_and_attributes(model):
    attributes, parameters = dict(vars(model)), dict(model.named_parameters())
    model.patch()
    greedy(model)
    assert model.unpatch() is model
    assert type(model) is LlamaForCausalLM
    assert vars(model) == attributes
    assert dict(model.named_parameters()) == parameters
    assert model.unpatch() is model


def test_patch_again(model):
    engine = hfpaged.engine(model.patch(block_size=32))
    assert model.patch(block_size=32) is model
    assert hfpaged.engine(model) is engine
    with pytest.raises(AlreadyPatchedError):
        model.patch()
    assert hfpaged.engine(model) is engine


def test_patch_after_unpatch_takes_other_options(model):
    model.patch(block_size=32)
    assert_stock_text(model)
    model.unpatch()
    model.patch(block_size=16)
    assert_stock_text(model)
    assert hfpaged.engine(model).stats()["block_size"] == 16


def test_unknown_option_leaves_the_model_alone(model):
    with pytest.raises(ConfigError, match="blocksize"):
        model.patch(blocksize=16)
    assert type(model) is LlamaForCausalLM and not is_patched(model)


def test_engine_of_an_unpatched_model(model):
    with pytest.raises(NotPatchedError):
        hfpaged.engine(model)


def test_patched_for_a_block(model):
    with hfpaged.patched(model) as same:
        assert same is model and is_patched(model)
        with hfpaged.patched(model):
            pass
        assert is_patched(model)
    assert not is_patched(model)
    with pytest.raises(KeyError), hfpaged.patched(model):
        raise KeyError
    assert not is_patched(model)


def test_no_other_model_is_touched(model):
    other = build_tiny("llama", seed=1, num_hidden_layers=2)
    before = greedy(other)
    members = dict(vars(LlamaForCausalLM))
    model.patch()
    greedy(model)
    assert type(other) is LlamaForCausalLM and not is_patched(other)
    assert other.generate.__func__ is GenerationMixin.generate
    assert dict(vars(LlamaForCausalLM)) == members
    assert greedy(other) == before


class CountedOperations(TorchDispatchMode):
    """Counts what reaches a device: every operation on tensors, making one included."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_patch_starts_no_thread_and_makes_no_tensor(model):
    threads = set(threading.enumerate())
    with CountedOperations() as operations:
        model.patch()
    assert operations.count == 0
    assert set(threading.enumerate()) <= threads
    assert hfpaged.engine(model).stats()["blocks_total"] == 0


def test_requests_of_an_unpatched_model_end_with_an_error(model):
    model.patch()
    handle = hfpaged.engine(model).submit([3, 4, 5], max_new_tokens=400, eos_token_id=-1)
    model.unpatch()
    with pytest.raises(EngineReleasedError):
        handle.result(timeout=10)


@pytest.mark.parametrize("patched_before", [False, True])
def test_pipeline(model, patched_before):
    pipe = pipeline("text-generation", model=model, tokenizer=FakeTokenizer())
    pipe_class = type(pipe)
    if patched_before:
        model.patch()
    for _ in range(2):
        assert hfpaged.patch(pipe) is pipe
        assert is_patched(model) and is_patched(pipe)
        assert type(pipe).__mro__[1] is pipe_class
    hfpaged.unpatch(pipe)
    assert not is_patched(model) and type(pipe) is pipe_class


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: model.compile() or model], ids=["wrapper", "in place"])
def test_compiled_model(model, wrap):
    compiled = wrap(model)
    hfpaged.patch(compiled)
    assert is_patched(model)
    assert_stock_text(model)
    assert greedy(compiled) == greedy(model)
    hfpaged.unpatch(compiled)
    assert type(model) is LlamaForCausalLM


def test_what_cannot_be_unwrapped():
    assert hfpaged.support(object()) == ["object is not a Transformers PreTrainedModel"]
    assert hfpaged.support(torch.nn.Linear(2, 2)) == ["Linear is not a Transformers PreTrainedModel"]
    with pytest.raises(NotPatchedError):
        hfpaged.engine(object())


class FakeTokenizer:
    """Enough for a pipeline to be built; no test tokenizes."""

    padding_side, pad_token_id, eos_token_id = "left", 0, 2
    _tokenizer = None
