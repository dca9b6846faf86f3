"""The sentinel: fused code that computes garbage is found out, and what is only odd is left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import hfpaged
from hfpaged.errors import CorruptOutputError
from hfpaged.native import library
from hfpaged.runtime.leaf_tier import LeafTier
from hfpaged.runtime.program_tier import ProgramTier
from hfpaged.runtime.runner import Runner
from hfpaged.runtime.sentinel import REPEATS
from hfpaged.runtime.tier import StepOutput
from hfpaged.runtime.tier_choice import FUSIONS_OFF

PROMPTS = [[5, 17, 3, 99], [42, 8, 1, 60, 11]]
NEW = 12
TIERS = pytest.mark.parametrize("tier", ["program", "leaves", "modules"])


@pytest.fixture
def model(tiny_model) -> PreTrainedModel:
    if library.unavailable():
        pytest.skip(library.unavailable())
    return tiny_model("llama").eval()


def run(model: PreTrainedModel, new_tokens: int = NEW, **options: object) -> tuple[list[list[int]], dict]:
    with hfpaged.patched(model, num_blocks=64, **options):
        engine = hfpaged.engine(model)
        handles = [engine.submit(prompt, max_new_tokens=new_tokens, eos_token_id=None) for prompt in PROMPTS]
        results = [handle.result(timeout=60) for handle in handles]
        engine.check()
        return results, engine.stats()


def corrupting(spoil, tier=ProgramTier):
    """The tier's run with wrong outputs, and keys and values that are wrong too."""
    run = tier.run

    def corrupt(self, batch, want_logits):
        output = run(self, batch, want_logits)
        for pair in getattr(self, "_kv", ()):  # only the program's are at hand
            for part in pair:
                part[: len(part) // 2].normal_()
        return spoil(output, want_logits)

    return corrupt


def not_finite(output: StepOutput, want_logits: bool) -> StepOutput:
    """What a kernel gives whose numbers are none: NaN, whose argmax is 0."""
    logits = torch.full_like(output.logits, float("nan")) if want_logits else None
    return StepOutput(logits, always(0, output))


def always_seven(output: StepOutput, want_logits: bool) -> StepOutput:
    if want_logits:
        output.logits[:, 7] = output.logits.max() + 10
    return StepOutput(output.logits if want_logits else None, always(7, output))


def always(token: int, output: StepOutput) -> np.ndarray | None:
    return None if output.argmax is None else np.full_like(output.argmax, token)


@pytest.mark.parametrize("tier", [ProgramTier, LeafTier], ids=lambda tier: tier.name)
@pytest.mark.parametrize("spoil", [not_finite, always_seven], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("scored", [False, True], ids=["greedy", "with scores"])
def test_requests_of_a_wrong_fusion_begin_again_without_it(
    model, stock_greedy, monkeypatch, caplog, tier, spoil, scored
):
    expected = [stock_greedy(model, prompt, NEW) for prompt in PROMPTS]
    monkeypatch.setattr(tier, "run", corrupting(spoil, tier))
    if scored:  # a call that asks for scores runs with logits
        monkeypatch.setattr("hfpaged.runtime.stepper.wants_logits", lambda plan, live: True)
    results, stats = run(model, sentinel=True, tier=tier.name)
    assert results == expected
    assert stats["tier"] == "modules" and stats["tier_reason"] == FUSIONS_OFF
    assert stats["sentinel_corruptions"] == 1 and stats["sentinel_checks"] == 1
    assert any("begin again" in record.message for record in caplog.records)


def test_without_it_the_corruption_goes_on(model, stock_greedy, monkeypatch):
    monkeypatch.setattr(ProgramTier, "run", corrupting(always_seven))
    results, stats = run(model)
    assert results == [[7] * NEW] * 2
    assert stats["tier"] == "program" and stats["sentinel_checks"] == 0


@TIERS
def test_a_model_that_means_it_is_left_alone(model, tier):
    with torch.no_grad():
        # Every hidden state gives token 7 the largest logit: the last norm of the sum of a constant direction.
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
        model.lm_head.weight[7] = 1.0
    results, stats = run(model, sentinel=True, tier=tier)
    assert results == [[0] * NEW] * 2  # all logits are 0, and the first of equal ones wins
    assert stats["tier"] == tier and stats["sentinel_corruptions"] == 0
    assert stats["sentinel_checks"] >= 1
    assert NEW > REPEATS


@pytest.mark.parametrize("tier", ["auto", "modules"])
def test_a_corrupt_model_is_named_by_its_first_corrupt_module(model, tier):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(CorruptOutputError) as caught:
        run(model, sentinel=True, tier=tier)
    assert caught.value.layer == "model.layers.1.mlp.up_proj"


def test_it_is_on_for_quantized_models_unless_told_otherwise(model, monkeypatch):
    monkeypatch.setattr(ProgramTier, "run", corrupting(not_finite))
    model.is_quantized = True
    _, stats = run(model)
    assert stats["sentinel_corruptions"] == 1
    model.is_quantized = True
    _, stats = run(model, sentinel=False)
    assert stats["sentinel_corruptions"] == 0


def test_once_off_fusions_stay_off_for_later_requests(model, monkeypatch):
    monkeypatch.setattr(ProgramTier, "run", corrupting(not_finite))
    with hfpaged.patched(model, num_blocks=64, sentinel=True):
        engine = hfpaged.engine(model)
        first = engine.submit(PROMPTS[0], max_new_tokens=4, eos_token_id=None).result(timeout=60)
        engine.release()
        again = engine.submit(PROMPTS[0], max_new_tokens=4, eos_token_id=None).result(timeout=60)
        assert again == first
        assert engine.stats()["tier"] == "modules" and engine.stats()["sentinel_corruptions"] == 1


def test_only_rows_with_token_0_are_computed_again(model, stock_greedy, monkeypatch):
    """Their argmax is what that of numbers which are none would be."""
    first = stock_greedy(model, PROMPTS[0], 1)[0]
    with torch.no_grad():
        model.lm_head.weight[[0, first]] = model.lm_head.weight[[first, 0]]
    expected = [stock_greedy(model, prompt, 1) for prompt in PROMPTS]
    assert expected[0] == [0] and expected[1] != [0]
    sizes = []
    recompute = Runner.recompute

    def noted(self, plan, tier):
        sizes.append(len(plan.entries))
        return recompute(self, plan, tier)

    monkeypatch.setattr(Runner, "recompute", noted)
    results, stats = run(model, 1, sentinel=True)
    assert results == expected and sizes == [1]
    assert stats["sentinel_checks"] == 0
