"""Copies, pickles and checkpoints of a patched model are of the unpatched one."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from oracle import assert_stock_text, greedy
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hfpaged.patched_model import is_patched


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle of protocol 2": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_copy_is_unpatched_and_works(model, make_copy):
    model.patch()
    texts = assert_stock_text(model)
    copied = make_copy(model)
    assert type(copied) is LlamaForCausalLM and not is_patched(copied)
    assert not [name for name in vars(copied) if "hfpaged" in name]
    assert greedy(copied) == texts
    copied.patch()
    assert assert_stock_text(copied) == texts
    assert is_patched(model) and greedy(model) == texts


def test_copy_does_not_follow_the_original(model):
    texts = greedy(model.patch())
    copied = copy.deepcopy(model).patch()
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert greedy(copied) == texts


def test_state_dict_is_the_same(model):
    before = model.state_dict()
    after = model.patch().state_dict()
    greedy(model)
    assert list(after) == list(before)
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in before)
    assert model.load_state_dict(before).missing_keys == []


def test_checkpoint_round_trip(model, tmp_path):
    texts = greedy(model.patch())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert type(loaded) is LlamaForCausalLM
    assert greedy(loaded) == texts
    assert assert_stock_text(loaded.patch()) == texts
