"""The life of LoRA adapters on a patched model: each text is a fresh copy's, generated on the engine."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import left_padded, new_tokens
from families import build_tiny
from oracle import GREEDY, NEW, PROMPTS, assert_stock_text, greedy, stats, warm_up
from pause import paused_at_step
from peft import LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import LlamaForCausalLM

import hfpaged
from hfpaged.patched_model import is_patched


def lora(**fields):
    targets = ["q_proj", "v_proj", "up_proj"]
    return LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type=TaskType.CAUSAL_LM, **fields)


def randomize(model, adapter, seed):
    """A new adapter adds nothing until its B matrix is trained."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if f".{adapter}." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def with_adapters(model, *names):
    peft_model = get_peft_model(model, lora(), adapter_name=names[0])
    for name in names[1:]:
        peft_model.add_adapter(name, lora())
    for seed, name in enumerate(names):
        randomize(peft_model, name, seed)
    return peft_model.eval()


@pytest.fixture
def adapted(model):
    """A PEFT model with adapter "red" active and "blue" there, patched through the wrapper."""
    return hfpaged.patch(with_adapters(model, "red", "blue"))


def test_patched_before_the_adapter(model):
    base = warm_up(model.patch())
    peft_model = with_adapters(model, "red")
    assert is_patched(peft_model) and peft_model.get_base_model() is model
    assert assert_stock_text(peft_model) != base


def test_patched_after_the_adapter(model):
    base = greedy(model)
    peft_model = with_adapters(model, "red")
    assert peft_model.patch() is model
    assert assert_stock_text(peft_model) != base
    peft_model.unpatch()
    assert type(model) is LlamaForCausalLM


def test_wrapper_and_wrapped_model_give_the_same(model):
    peft_model = with_adapters(model.patch(), "red")
    assert assert_stock_text(peft_model) == assert_stock_text(model)


def test_merge_and_unmerge(adapted):
    text = warm_up(adapted)
    adapted.merge_adapter()
    assert assert_stock_text(adapted) == text
    adapted.unmerge_adapter()
    assert assert_stock_text(adapted) == text
    assert stats(adapted)["weight_changes"] == 2


def test_disabled_adapter(adapted):
    text = warm_up(adapted)
    for _ in range(2):
        with adapted.disable_adapter():
            assert assert_stock_text(adapted) != text
        assert assert_stock_text(adapted) == text


def test_disabled_after_a_merge(adapted):
    """PEFT takes the merge back inside the next forward, and leaves it so."""
    text = warm_up(adapted)
    adapted.merge_adapter()
    with adapted.disable_adapter():
        assert assert_stock_text(adapted) != text
        assert not adapted.base_model.model.model.layers[0].self_attn.q_proj.merged
    assert assert_stock_text(adapted) == text


def test_disabled_after_a_merge_that_was_used(adapted):
    adapted.merge_adapter()
    text = warm_up(adapted)
    with adapted.disable_adapter():
        assert assert_stock_text(adapted) != text
    assert assert_stock_text(adapted) == text
    adapted.merge_adapter()
    assert assert_stock_text(adapted) == text


def test_two_adapters_never_share_prefixes(adapted):
    texts = {"red": warm_up(adapted)}
    adapted.set_adapter("blue")
    cached = stats(adapted)["cached_prompt_tokens"]
    texts["blue"] = assert_stock_text(adapted)
    assert stats(adapted)["cached_prompt_tokens"] - cached <= 16
    assert texts["red"] != texts["blue"]
    for name in ("red", "blue", "blue", "red"):
        adapted.set_adapter(name)
        assert assert_stock_text(adapted) == texts[name]


def test_deleted_adapter(adapted):
    warm_up(adapted)
    adapted.set_adapter("blue")
    text = warm_up(adapted)
    adapted.delete_adapter("red")
    assert assert_stock_text(adapted) == text


def test_deleted_active_adapter(adapted):
    warm_up(adapted)
    adapted.delete_adapter("red")
    assert_stock_text(adapted)


def test_other_scale(adapted):
    text = warm_up(adapted)
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    layer.scale_layer(5.0)
    assert assert_stock_text(adapted) != text
    layer.unscale_layer()
    assert assert_stock_text(adapted) == text


def test_trained_adapter(adapted):
    text = warm_up(adapted)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.3, fused=True)
    ids = torch.tensor([PROMPTS[1]])
    adapted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert assert_stock_text(adapted) != text


def test_dora(model):
    peft_model = get_peft_model(model, lora(use_dora=True), adapter_name="red").eval()
    randomize(peft_model, "red", 0)
    text = warm_up(hfpaged.patch(peft_model))
    assert assert_stock_text(peft_model) == text
    with peft_model.disable_adapter():
        assert assert_stock_text(peft_model) != text


def test_merged_and_unloaded(adapted):
    text = warm_up(adapted)
    base = adapted.merge_and_unload()
    assert is_patched(base) and isinstance(base, LlamaForCausalLM)
    assert assert_stock_text(base) == text


def test_unloaded(model):
    base = warm_up(model.patch())
    peft_model = with_adapters(model, "red")
    warm_up(peft_model)
    assert assert_stock_text(peft_model.unload()) == base


def test_adapters_without_a_wrapper(model):
    """As Transformers' own add_adapter, disable_adapters and enable_adapters do it."""
    base = warm_up(model.patch())
    inject_adapter_in_model(lora(), model, adapter_name="red").eval()
    randomize(model, "red", 0)
    text = assert_stock_text(model)
    assert text != base
    for enabled in (False, True):
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(enabled)
        assert assert_stock_text(model) == (text if enabled else base)


def test_checkpoint_of_an_adapter(adapted, tmp_path):
    text = warm_up(adapted)
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(build_tiny("llama", num_hidden_layers=2), tmp_path / "red").eval()
    assert assert_stock_text(hfpaged.patch(loaded)) == text


def test_copy_of_a_wrapper_is_unpatched(adapted):
    text = warm_up(adapted)
    copied = copy.deepcopy(adapted)
    assert not is_patched(copied) and greedy(copied) == text


def test_prompt_tuning_runs_stock(model):
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    peft_model = get_peft_model(model, config).eval()
    options = {**left_padded(PROMPTS[:1]), "max_new_tokens": NEW, **GREEDY}
    want = peft_model.generate(**options)
    hfpaged.patch(peft_model)
    assert torch.equal(peft_model.generate(**options), want)
    assert sum(stats(peft_model)["fallbacks"].values()) == 1


def test_a_running_request_keeps_its_adapter(adapted):
    """Whoever switches adapters waits for those who run; no text is half of one and half of another."""
    prompt = PROMPTS[0]
    want = {}
    for name in ("blue", "red"):
        adapted.set_adapter(name)
        out = copy.deepcopy(adapted).generate(**left_padded([prompt]), max_new_tokens=60, **GREEDY)
        want[name] = new_tokens(out, [prompt])[0]
    assert want["red"] != want["blue"]
    engine = hfpaged.engine(adapted)
    engine.submit([3], max_new_tokens=1, **GREEDY).result(60)
    with paused_at_step(adapted, 5) as paused:
        running = engine.submit(prompt, max_new_tokens=60, **GREEDY)
        assert paused.wait(60)
        adapted.set_adapter("blue")
        joined = engine.submit(prompt, max_new_tokens=60, **GREEDY)
    assert running.result(60) == want["red"]
    assert joined.result(60) == want["blue"]
