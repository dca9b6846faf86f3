"""WeightsWatch: what proves a change at once, and what takes reading the bytes."""

from __future__ import annotations

import pytest
import torch
from families import build_tiny
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from hfpaged.native import library
from hfpaged.runtime import weights_watch
from hfpaged.runtime.weights_watch import (
    WeightsWatch,
    fingerprint,
    plain_tensors,
    weights_fingerprint,
    weights_identity,
)

HAS_KERNELS = library.unavailable() is None
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64)


@pytest.fixture
def model():
    return build_tiny("llama", num_hidden_layers=2)


@pytest.fixture(params=["native", "torch"])
def hashed_by(request, monkeypatch):
    """Both ways to fingerprint."""
    if request.param == "torch":
        monkeypatch.setattr(library, "unavailable", lambda: "switched off")
    elif not HAS_KERNELS:
        pytest.skip("no kernels here")


class Halves(torch.Tensor):
    """A wrapper subclass as quantized weights are: its bytes are in two tensors."""

    @staticmethod
    def __new__(cls, high, low):
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=torch.float32)

    def __init__(self, high, low):
        self.high, self.low = high, low

    def __tensor_flatten__(self):
        return ["high", "low"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["high"], tensors["low"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrapped = [arg.high.float() if isinstance(arg, Halves) else arg for arg in args]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].high, args[0].low))
        return func(*unwrapped, **(kwargs or {}))


def with_wrapped_weight():
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(Halves(torch.ones(4, 4), torch.zeros(4, 4, dtype=torch.int8)), requires_grad=False)
    return module


# ---- identity ----


def bump_version(model):
    with torch.no_grad():
        model.lm_head.weight.add_(0)


def move_pointer(model):
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def replace_object(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.data)


def change_dtype(model):
    model.lm_head.weight.data = model.lm_head.weight.data.view(torch.int32).view(torch.float32).to(torch.float16)


def change_shape(model):
    model.lm_head.weight.data = model.lm_head.weight.data.view(64, 128)


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


IDENTITY_CHANGES = (bump_version, move_pointer, replace_object, change_dtype, change_shape, tie)


@pytest.mark.parametrize("change", IDENTITY_CHANGES, ids=lambda change: change.__name__)
def test_identity_shows(model, change):
    watch, before = WeightsWatch(model, watch_content=False), weights_identity(model)
    assert weights_identity(model) == before
    assert not watch.changed(model, look_at_content=False)
    change(model)
    assert weights_identity(model) != before
    assert watch.changed(model, look_at_content=False)
    assert not watch.changed(model, look_at_content=False)


def test_identity_does_not_show_writes_to_data(model):
    before = weights_identity(model)
    model.lm_head.weight.data += 1
    assert weights_identity(model) == before


def test_identity_leaves_buffers_out(model):
    """Some rotary embeddings register theirs anew in every forward."""
    before = weights_identity(model)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    assert weights_identity(model) == before


def test_identity_of_parameters_without_a_version():
    with torch.inference_mode():
        module = nn.Linear(2, 2)
    watch = WeightsWatch(module)
    assert not watch.changed(module, look_at_content=True)
    module.weight.data = torch.zeros(2, 2)
    assert watch.changed(module, look_at_content=False)


# ---- content ----


def test_watch_reads_the_bytes_when_asked(model, hashed_by):
    watch = WeightsWatch(model)
    model.lm_head.weight.data += 1
    assert not watch.changed(model, look_at_content=False)
    assert watch.changed(model, look_at_content=True)
    assert not watch.changed(model, look_at_content=True)


def test_watch_of_frozen_weights_never_reads(model, monkeypatch):
    monkeypatch.setattr(weights_watch, "fingerprint", lambda tensor: pytest.fail("the weights were read"))
    watch = WeightsWatch(model, watch_content=False)
    model.lm_head.weight.data += 1
    assert not watch.changed(model, look_at_content=True)
    bump_version(model)
    assert watch.changed(model, look_at_content=True)


def test_a_seen_change_is_not_reported_twice(model):
    """The content is read again with it: the next look finds nothing new."""
    watch = WeightsWatch(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert watch.changed(model, look_at_content=False)
    assert not watch.changed(model, look_at_content=True)


def test_back_to_the_old_content_is_a_change(model, hashed_by):
    watch = WeightsWatch(model)
    saved = model.lm_head.weight.detach().clone()
    model.lm_head.weight.data.neg_()
    assert watch.changed(model, look_at_content=True)
    model.lm_head.weight.data.copy_(saved)
    assert watch.changed(model, look_at_content=True)


def test_buffers_count_by_content(model, hashed_by):
    watch = WeightsWatch(model)
    buffer = model.model.rotary_emb.inv_freq
    model.model.rotary_emb.inv_freq = buffer.clone()
    assert not watch.changed(model, look_at_content=True)
    model.model.rotary_emb.inv_freq[-1] *= 1.001
    assert watch.changed(model, look_at_content=True)


def test_shared_memory_is_read_once(model, monkeypatch):
    model.lm_head.weight = model.model.embed_tokens.weight
    model.register_buffer("alias", model.lm_head.weight.detach())
    read = []
    monkeypatch.setattr(weights_watch, "fingerprint", lambda tensor: read.append(tensor.data_ptr()) or 0)
    weights_fingerprint(model)
    assert read.count(model.lm_head.weight.data_ptr()) == 1
    assert len(read) == len(set(read))


def test_different_views_of_one_memory_are_all_read(hashed_by):
    module = nn.Module()
    memory = torch.randn(4, 4)
    module.register_buffer("first_row", memory[0])
    module.register_buffer("first_column", memory[:, 0])
    before = weights_fingerprint(module)
    memory[2, 0] += 1
    assert weights_fingerprint(module) != before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (33, 65)], ids=str)
def test_every_element_counts(dtype, shape, hashed_by):
    tensor = torch.randint(0, 2, shape).to(dtype)
    before = int(fingerprint(tensor))
    assert int(fingerprint(tensor.clone())) == before
    for index in range(0, tensor.numel(), 97):
        changed = tensor.clone()
        changed.view(-1)[index] = 1 - changed.view(-1)[index].to(torch.int64)
        assert int(fingerprint(changed)) != before


def test_order_counts(hashed_by):
    tensor = torch.randn(8, 16)
    seen = {int(fingerprint(tensor[torch.randperm(8, generator=torch.Generator().manual_seed(i))])) for i in range(50)}
    assert len(seen) == 50
    assert int(fingerprint(tensor.flip(-1))) not in seen


def test_sign_changes_do_not_cancel(hashed_by):
    """The sign of every other fp32 number is the top bit of a 64-bit word."""
    tensor = torch.randn(64)
    before = int(fingerprint(tensor))
    for step in (2, 4, 8, 16):
        changed = tensor.clone()
        changed[1::step] *= -1
        assert int(fingerprint(changed)) != before


def test_length_counts(hashed_by):
    assert len({int(fingerprint(torch.zeros(length))) for length in range(1, 20)}) == 19


def test_strided_tensors_are_read_as_they_look(hashed_by):
    tensor = torch.randn(6, 10)
    assert int(fingerprint(tensor.t())) == int(fingerprint(tensor.t().contiguous()))
    assert int(fingerprint(tensor[:, ::2])) == int(fingerprint(tensor[:, ::2].clone()))


def test_empty_tensors(hashed_by):
    assert int(fingerprint(torch.empty(0))) == int(fingerprint(torch.empty(0)))


@pytest.mark.skipif(not HAS_KERNELS, reason="no kernels here")
def test_chunks_do_not_show(monkeypatch):
    tensor = torch.randn(1000)
    whole = int(weights_watch._torch_fingerprint(tensor))
    monkeypatch.setattr(weights_watch, "FALLBACK_CHUNK", 64)
    assert int(weights_watch._torch_fingerprint(tensor)) == whole


# ---- tensors made of tensors ----


def test_parts_of_a_wrapper_are_the_weights(hashed_by):
    module = with_wrapped_weight()
    assert [plain.dtype for plain in plain_tensors(module.weight)] == [torch.float32, torch.int8]
    watch = WeightsWatch(module)
    module.weight.low[3, 3] = 1
    assert watch.changed(module, look_at_content=False)
    module.weight.low.data[3, 3] = 2
    assert not watch.changed(module, look_at_content=False)
    assert watch.changed(module, look_at_content=True)


def test_weights_without_memory_are_left_out():
    module = nn.Linear(2, 2, device="meta")
    assert weights_identity(module) == [] and weights_fingerprint(module) == ()
