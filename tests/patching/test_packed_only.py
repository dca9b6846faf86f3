"""`packed_only`: parameters without memory, which are back, bit for bit, for whatever else asks for them."""

from __future__ import annotations

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from batches import random_prompts
from families import build_tiny
from oracle import assert_stock_text, greedy, stats, warm_up
from torch import nn
from transformers import AutoModelForCausalLM

import hfpaged
from hfpaged.errors import ConfigError, NotPatchedError
from hfpaged.runtime.released_weights import ReleasedWeight

PROMPTS = random_prompts((9, 5))
CASES = [("llama", "program"), ("phi3", "program"), ("mixtral", "program"), ("llama", "leaves"), ("gpt2", "leaves"),
         ("phi3", "leaves")]  # fmt: skip
cases = pytest.mark.parametrize(("family", "tier"), CASES)


def build(family="llama", dtype=torch.float32, **fields):
    return build_tiny(family, num_hidden_layers=2, **fields).to(dtype)


def released(model):
    return [name for name, parameter in model.named_parameters() if type(parameter) is ReleasedWeight]


def bits(model):
    """Copies of all parameters, which are brought back for it."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_bits(now, before):
    assert now.keys() == before.keys()
    for name, tensor in now.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


def patched(family="llama", tier="auto", dtype=torch.float32, **fields):
    """A patched model whose weights are released, and the bits that they had."""
    model = build(family, dtype, **fields)
    before = bits(model)
    greedy(model.patch(packed_only=True, tier=tier), PROMPTS)
    assert stats(model)["released_bytes"] > 0
    return model, before


@cases
def test_texts_are_stocks_and_stay(family, tier):
    model = build(family)
    expected = greedy(model, PROMPTS)
    model.patch(packed_only=True, tier=tier)
    assert greedy(model, PROMPTS) == greedy(model, PROMPTS) == expected
    assert stats(model)["tier"] == tier and stats(model)["weight_changes"] == 0
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in embeddings}
    # The experts' router of Mixtral is one of them.
    assert released(model) == list(matrices)
    assert stats(model)["released_bytes"] == sum(parameter.nbytes for parameter in matrices.values())


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_everything_is_as_before(family, tier, dtype):
    model, before = patched(family, tier, dtype)
    state = model.state_dict()
    assert_same_bits({name: state[name] for name in before}, before)
    assert stats(model)["released_bytes"] == 0
    assert all(type(each) is nn.Parameter and each.requires_grad for each in model.parameters())


def test_special_numbers_keep_their_bits():
    model = build(dtype=torch.bfloat16)
    model.model.layers[0].mlp.up_proj.weight.data[0, :4] = torch.tensor([-0.0, 1e-40, 3e4, -1e-38])
    before = bits(model)
    greedy(model.patch(packed_only=True), PROMPTS)
    assert "model.layers.0.mlp.up_proj.weight" in released(model)
    assert_same_bits(bits(model), before)


def test_the_memory_is_given_up():
    model = build()
    array = np.zeros((64, 64), dtype=np.float32)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.from_numpy(array))
    memory = weakref.ref(array)
    del array
    model.patch(packed_only=True)
    assert memory() is not None
    greedy(model, PROMPTS)
    assert memory() is None


def test_a_prefix_stays_cached():
    warm_up(build().patch(packed_only=True))


def test_what_can_be_said_without_numbers_leaves_them_released():
    model, _ = patched()
    for parameter in model.parameters():
        assert parameter.numel() == parameter.shape.numel() and parameter.is_leaf and parameter.grad is None
        assert (parameter.dtype, parameter.device.type, parameter.dim()) == (torch.float32, "cpu", parameter.ndim)
        assert {parameter: 1}[parameter] == 1
    assert model.num_parameters() and model.dtype == torch.float32 and model.device.type == "cpu"
    assert stats(model)["released_bytes"] > 0


def test_a_tied_embedding_keeps_its_memory():
    model, _ = patched(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "model.embed_tokens.weight" not in released(model) and "model.layers.0.mlp.up_proj.weight" in released(model)
    assert_stock_text(model)


@pytest.mark.parametrize("tier", ["program", "leaves"])
def test_saved_files_are_the_same(tmp_path, tier):
    model, before = patched(tier=tier)
    model.save_pretrained(tmp_path)
    assert_same_bits(bits(AutoModelForCausalLM.from_pretrained(tmp_path)), before)


def test_training_is_stocks_and_shows_in_the_next_text():
    def step(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        ids = torch.tensor([PROMPTS[0]])
        model.train()(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()

    twin = build()
    model, _ = patched()
    before = greedy(model)
    step(model)
    step(twin)
    assert_same_bits(bits(model), bits(twin))
    assert assert_stock_text(model) != before
    greedy(model)
    assert stats(model)["released_bytes"] > 0


@pytest.mark.parametrize("when", ["before", "while released"])
def test_an_optimizer_trains_the_models_own_parameters(when):
    model = build().patch(packed_only=True)
    if when == "while released":
        greedy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    greedy(model)
    # What somebody holds would go on taking memory, so it stays.
    assert bool(released(model)) == (when == "while released")
    ids = torch.tensor([PROMPTS[0]])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_stock_text(model)


CHANGES = {
    "copy_": lambda model: model.lm_head.weight.data.copy_(-model.lm_head.weight),
    "in place": lambda model: nn.init.normal_(model.model.layers[1].mlp.down_proj.weight, std=0.3),
    "another parameter": lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.randn(128, 64))),
    "load_state_dict": lambda model: model.load_state_dict(build(seed=5).state_dict()),
    "assign": lambda model: model.load_state_dict(build(seed=5).state_dict(), assign=True),
    "a norm": lambda model: model.model.norm.weight.data.uniform_(-1, 1),
    "half and back": lambda model: model.half().float(),
}


@pytest.mark.parametrize("tier", ["program", "leaves"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes(name, tier):
    model, _ = patched(tier=tier)
    greedy(model)
    CHANGES[name](model)
    assert_stock_text(model)
    greedy(model)
    assert stats(model)["released_bytes"] > 0


def test_a_replaced_parameter_keeps_its_own_numbers():
    model, before = patched()
    old = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(torch.randn(128, 64))
    greedy(model)
    assert torch.equal(old, before["lm_head.weight"])


def test_copies_are_plain():
    model, before = patched()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        greedy(model, PROMPTS)
        assert not released(made) and all(type(each) is nn.Parameter for each in made.parameters())
        assert_same_bits(bits(made), before)


class TestIsOver:
    def test_after_unpatch(self):
        model, before = patched()
        hfpaged.unpatch(model)
        assert not released(model)
        assert_same_bits(bits(model), before)

    def test_after_a_release_until_the_next_call(self):
        model, _ = patched()
        hfpaged.engine(model).release()
        assert not released(model)
        greedy(model, PROMPTS)
        assert released(model)

    def test_for_a_layer_that_outlives_the_model(self):
        model, before = patched()
        layer = model.model.layers[0]
        del model
        assert torch.equal(layer.mlp.up_proj.weight, before["model.layers.0.mlp.up_proj.weight"])
        assert type(layer.self_attn.q_proj.weight) is nn.Parameter


def test_reading_weights_disturbs_no_running_request():
    model, before = patched()
    expected = greedy(model, PROMPTS, 40)
    handles = [hfpaged.engine(model).submit(prompt, max_new_tokens=40, eos_token_id=-1) for prompt in PROMPTS]
    assert_same_bits(bits(model), before)
    assert [handle.result() for handle in handles] == expected


HOLDERS = {"itself": lambda p: p, "weak": weakref.ref, "view": lambda p: p[3], "data": lambda p: p.data}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_parameter_that_somebody_refers_to_stays(hold):
    model = build()
    model.lm_head.weight.requires_grad_(False)
    _held, before = hold(model.lm_head.weight), id(model.lm_head.weight)
    greedy(model.patch(packed_only=True), PROMPTS)
    assert id(model.lm_head.weight) == before and type(model.lm_head.weight) is nn.Parameter
    assert "model.layers.0.mlp.up_proj.weight" in released(model)


def test_shared_memory_is_kept():
    model = build()
    up, gate = model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.gate_proj
    gate.weight = nn.Parameter(up.weight.detach())
    greedy(model.patch(packed_only=True), PROMPTS)
    assert not {f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate")} & set(released(model))
    up.weight.data.neg_()
    assert torch.equal(up.weight, gate.weight)
    assert_stock_text(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "modules"}, "tier='modules' does not have"),
        ({"attention_backend": "torch"}, "native attention backend, not 'torch'"),
        ({"block_size": 8}, "multiple of 16, got 8"),
    ],
)
def test_what_can_never_have_packed_weights_is_refused_at_once(options, message):
    model = build()
    with pytest.raises(ConfigError, match=message):
        model.patch(packed_only=True, **options)
    with pytest.raises(NotPatchedError):
        hfpaged.engine(model)


def test_a_model_that_cannot_have_packed_weights_is_refused_at_the_first_request():
    model = build().patch(packed_only=True)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast is on"):
        hfpaged.engine(model).submit([5, 6, 7], max_new_tokens=1).result()


@pytest.mark.parametrize("tier", ["program", "leaves"])
def test_other_threads_compute_and_save_meanwhile(tier):
    model, before = patched(tier=tier)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        logits, expected = model(ids).logits, greedy(model, PROMPTS)

    def compute(_):
        with torch.no_grad():
            return torch.equal(model(ids).logits, logits)

    def save(_):
        return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    with ThreadPoolExecutor(2) as others:
        running = [others.map(compute, range(20)), others.map(save, range(20))]
        texts = [greedy(model, PROMPTS) for _ in range(5)]
        assert all(all(results) for results in running)
    assert texts == [expected] * 5
