"""A process of its own that times decode steps: on the thread policy, and on fixed numbers of threads, in turns.

Usage: step_times.py MODEL_DIRECTORY REQUESTS ROUNDS TIER, a tier of program and leaves. Prints the mean seconds of a
step as JSON: {"policy": s, "1": s, "2": s}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from internals import workspace_of
from transformers import AutoModelForCausalLM, PreTrainedModel

import hfpaged
from hfpaged.cli.bench.profile import StepShape, make_batch, make_pool
from hfpaged.program.program import StepProgram
from hfpaged.program.threads import ThreadPolicy, usable_cpus

Step = Callable[[ThreadPolicy], None]

# Seconds of a turn: many periods of a CPU quota, so that each turn lives on what its own steps have left of it.
POLICY_TURN, FIXED_TURN = 1.0, 0.5
THREADS = 2
CONTEXT = 128


def main(model_path: str, requests: int, rounds: int, tier: str) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    policies = {str(n): ThreadPolicy(n, min_thread_seconds=0) for n in range(1, THREADS + 1)}
    policies["policy"] = ThreadPolicy(min(THREADS, usable_cpus()))
    step = {"program": program_step, "leaves": leaves_step}[tier](model, StepShape(requests, 1, CONTEXT))
    step(policies["1"])
    times: dict[str, list[float]] = {name: [] for name in policies}
    for _ in range(rounds):
        for name, policy in policies.items():
            turn = POLICY_TURN if name == "policy" else FIXED_TURN
            times[name] += timed_steps(lambda policy=policy: step(policy), turn)
    return {name: statistics.fmean(steps) for name, steps in times.items()}


def program_step(model: PreTrainedModel, shape: StepShape) -> Step:
    """Steps of the whole as one native program."""
    program = StepProgram.build(model, THREADS)
    batch, pool = make_batch(shape, model.config.vocab_size), make_pool(shape, program.description)

    def step(policy: ThreadPolicy) -> None:
        program.threads = policy
        program.run(batch, pool, batch.logit_rows)

    return step


def leaves_step(model: PreTrainedModel, shape: StepShape) -> Step:
    """Steps of native leaves, over an engine's pool."""
    engine = hfpaged.engine(model.patch(tier="leaves"))
    engine.submit([5, 6, 7], max_new_tokens=1).result()
    tier, batch = workspace_of(engine).tier, make_batch(shape, model.config.vocab_size)

    def step(policy: ThreadPolicy) -> None:
        tier.threads = policy
        tier.run(batch, want_logits=False)

    return step


def timed_steps(step: Callable[[], Any], turn: float) -> list[float]:
    """Run steps for at least `turn` seconds. Returns the seconds of each."""
    times: list[float] = []
    while sum(times) < turn:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
