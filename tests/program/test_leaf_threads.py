"""What the tier of leaves tells the thread policy of a step: in which part of the time its threads had the CPU."""

from __future__ import annotations

import pytest
import torch
from batches import random_prompts
from families import build_tiny
from internals import workspace_of
from oracle import assert_stock_text
from program.leafing import forward_of, gate, kernels, random_module, random_rows
from torch import nn

import hfpaged
from hfpaged.program.threads import ThreadPolicy
from hfpaged.runtime.leaves.linear_leaf import LinearLeaf
from hfpaged.runtime.leaves.usage import CpuUsage


def test_calls_on_several_threads_count_by_how_long_they_took():
    usage = CpuUsage()
    usage.add(seconds=1.0, threads=2, cpu_seconds=1.0)
    usage.add(seconds=0.5, threads=4, cpu_seconds=2.0)
    usage.add(seconds=9.0, threads=1, cpu_seconds=0.0)
    assert usage.had_cpu == pytest.approx(3.0 / 4.0)
    usage.clear()
    assert usage.had_cpu == 0.0


def test_native_calls_are_added_up():
    native = kernels(threads=2)
    module = random_module(lambda: nn.Linear(512, 3000), torch.float32)
    forward = forward_of(LinearLeaf({"it": module}, gate(), native), native)
    native.usage.clear()
    forward(random_rows(48, 512, torch.float32))
    assert 0 < native.usage.had_cpu < 1.2


class RecordingPolicy(ThreadPolicy):
    def __init__(self):
        super().__init__(2, min_thread_seconds=0)
        self.recorded = []

    def record(self, estimate, seconds, had_cpu=0.0):
        self.recorded.append(had_cpu)


def test_the_policy_hears_of_every_step():
    model = build_tiny("llama").patch(tier="leaves")
    engine = hfpaged.engine(model)
    engine.submit([5, 6, 7], max_new_tokens=1).result()
    tier = workspace_of(engine).tier
    tier.threads = policy = RecordingPolicy()
    engine.submit([5, 6, 7], max_new_tokens=4, eos_token_id=-1).result()
    assert len(policy.recorded) == 4 and all(had_cpu > 0 for had_cpu in policy.recorded)


@pytest.mark.parametrize("dense", [0, 2])
def test_layers_that_are_cut_elsewhere_have_plans_of_their_own(dense):
    # The dense layer is one call, the others' attention is one each: products are another part of its rows' costs.
    model = build_tiny("qwen3_moe", mlp_only_layers=[dense]).patch(tier="leaves")
    engine = hfpaged.engine(model)
    engine.submit([5, 6, 7], max_new_tokens=1).result()
    tier = workspace_of(engine).tier
    assert tier._leaves.native["layer"] == 1 and tier._leaves.native["attention"] == 3
    tier.threads = ThreadPolicy(2, min_thread_seconds=0)
    assert_stock_text(model, random_prompts((250, 100)))
