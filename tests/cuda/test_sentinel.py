"""The sentinel where steps run ahead of the host: it looks a step late, and waits for nothing that goes well."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from batches import alone, left_padded, new_tokens, random_prompts
from engine.hooks import WAIT_SECONDS
from families import build_tiny
from transformers import PreTrainedModel

import hfpaged
from hfpaged.errors import CorruptOutputError
from hfpaged.runtime.device import ahead_tier
from hfpaged.runtime.sentinel import REPEATS
from hfpaged.runtime.tier_choice import FUSIONS_OFF

PROMPTS = random_prompts((20, 5, 33))
NEW = 12
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": NEW}


@pytest.fixture(autouse=True)
def machine(cuda):
    return cuda


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    stock = build_tiny("llama")
    return [alone(stock, prompt, **GREEDY) for prompt in PROMPTS]


def garbage(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


def constant(x: torch.Tensor) -> torch.Tensor:
    """The same numbers whatever the input: one token for ever."""
    return torch.linspace(-1, 1, x.shape[-1]).expand_as(x).to(x.dtype)


def fuse_wrongly(monkeypatch, function, from_call: int = 0) -> None:
    """A kernel in the place of the last norm that is wrong from some call on, past whatever was checked before.

    What was captured before that call stays right.
    """

    class WrongForwards:
        def __init__(self, view, dtype, fusions):
            self.refusals: Counter[str] = Counter()
            norm, calls = view.model.model.norm, []
            right = norm.forward

            def forward(x):
                calls.append(1)
                return right(x) if len(calls) <= from_call else function(x)

            vars(norm)["forward"] = forward
            self.remove = lambda: vars(norm).pop("forward")

    monkeypatch.setattr(ahead_tier, "FusedForwards", WrongForwards)


def run(model: PreTrainedModel, prompts=PROMPTS, options=None, **config) -> tuple[list[list[int]], dict]:
    options = {"max_new_tokens": NEW, "eos_token_id": None, **(options or {})}
    with hfpaged.patched(model, num_blocks=64, **config):
        engine = hfpaged.engine(model)
        handles = [engine.submit(prompt, **options) for prompt in prompts]
        results = [handle.result(timeout=WAIT_SECONDS) for handle in handles]
        engine.check()
        return results, engine.stats()


@pytest.mark.parametrize(
    ("function", "from_call"),
    [(garbage, 0), (garbage, 1), (constant, 0)],
    ids=["NaN", "NaN later", "one token"],
)
def test_requests_of_a_wrong_kernel_begin_again_without_it(monkeypatch, texts, function, from_call):
    fuse_wrongly(monkeypatch, function, from_call)
    results, stats = run(build_tiny("llama"), sentinel=True)
    assert results == texts
    assert stats["sentinel_corruptions"] == stats["sentinel_checks"] == 1
    assert stats["tier_reason"] == FUSIONS_OFF and stats["failed_steps"] == 0
    assert stats["steps_ahead"] > 0


def test_without_it_the_corruption_goes_on(monkeypatch, texts):
    fuse_wrongly(monkeypatch, constant)
    results, stats = run(build_tiny("llama"))
    assert all(len(set(tokens)) == 1 for tokens in results) and stats["sentinel_checks"] == 0


def test_sampled_rows_begin_again_too(monkeypatch):
    sampling = {"do_sample": True, "temperature": 0.8, "hfpaged": {"seed": 5}}
    expected, _ = run(build_tiny("llama"), options=sampling)
    fuse_wrongly(monkeypatch, garbage)
    results, stats = run(build_tiny("llama"), options=sampling, sentinel=True)
    assert results == expected and stats["sentinel_corruptions"] == 1


def test_long_texts_are_recomputed_in_steps_of_the_usual_size(monkeypatch):
    prompts = random_prompts((70, 40))
    expected, _ = run(build_tiny("llama"), prompts, max_batch_tokens=16)
    fuse_wrongly(monkeypatch, garbage, from_call=5)
    results, stats = run(build_tiny("llama"), prompts, max_batch_tokens=16, sentinel=True)
    assert results == expected and stats["sentinel_corruptions"] == 1


def test_a_kernel_of_the_library_that_turns_wrong_is_found_out(monkeypatch, machine):
    model = build_tiny("llama").bfloat16()
    with hfpaged.patched(model, num_blocks=64, sentinel=True):
        hfpaged.engine(model)._stepper.workspaces.stop_fusing()
        expected = alone(model, PROMPTS[0], **GREEDY)
    kernel = machine.library.norm.rmsnorm
    checked = 8  # rows that kernels are compared by before they are used

    def wrong(x, *args):
        return kernel(x, *args) if len(x) == checked else garbage(x)

    monkeypatch.setattr(machine.library.norm, "rmsnorm", wrong)
    (result,), stats = run(model, PROMPTS[:1], sentinel=True)
    assert result == expected
    assert stats["sentinel_corruptions"] == 1 and stats["tier_reason"] == FUSIONS_OFF


def test_a_model_that_means_it_is_left_alone():
    model = build_tiny("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    results, stats = run(model, sentinel=True)
    assert results == [[0] * NEW] * len(PROMPTS) and NEW > REPEATS
    assert stats["sentinel_checks"] == len(PROMPTS) and stats["sentinel_corruptions"] == 0
    assert stats["tier_reason"] != FUSIONS_OFF


def test_a_corrupt_model_is_named_by_its_first_corrupt_module():
    model = build_tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(CorruptOutputError) as caught:
        run(model, sentinel=True)
    assert caught.value.layer == "model.layers.1.mlp.up_proj"


def test_once_off_fusions_stay_off(monkeypatch, texts):
    fuse_wrongly(monkeypatch, garbage)
    model = build_tiny("llama")
    with hfpaged.patched(model, num_blocks=64, sentinel=True):
        engine = hfpaged.engine(model)
        for _ in range(2):
            handle = engine.submit(PROMPTS[0], max_new_tokens=NEW, eos_token_id=None)
            assert handle.result(timeout=WAIT_SECONDS) == texts[0]
            engine.release()
        assert engine.stats()["sentinel_corruptions"] == 1


def test_looking_waits_for_nothing(machine, texts):
    waits = []
    for sentinel in (False, True):
        before = machine.device.host_waits
        model = build_tiny("llama")
        with hfpaged.patched(model, num_blocks=64, sentinel=sentinel):
            output = model.generate(**left_padded(PROMPTS), **GREEDY)
            stats = hfpaged.engine(model).stats()
        assert new_tokens(output, PROMPTS) == texts and stats["sentinel_checks"] == 0
        waits.append((machine.device.host_waits - before, stats["steps_ahead"], stats["captured_steps"]))
    assert waits[0] == waits[1] and waits[0][1] == NEW - 1
