"""A process of its own that times decode steps: on the thread policy, and on fixed numbers of threads, in turns.

Usage: step_times.py MODEL_DIRECTORY REQUESTS ROUNDS. Prints the mean seconds of a step as JSON:
{"policy": s, "1": s, "2": s}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hfpaged.cli.bench.profile import StepShape, make_batch, make_pool
from hfpaged.program.program import StepProgram
from hfpaged.program.threads import usable_cpus

# Seconds of a turn: many periods of a CPU quota, so that each turn lives on what its own steps have left of it.
POLICY_TURN, FIXED_TURN = 1.0, 0.5
THREADS = 2
CONTEXT = 128


def main(model_path: str, requests: int, rounds: int) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    programs = {str(n): StepProgram.build(model, n, min_thread_seconds=0) for n in range(1, THREADS + 1)}
    programs["policy"] = StepProgram.build(model, min(THREADS, usable_cpus()))
    shape = StepShape(requests, 1, CONTEXT)
    batch, pool = make_batch(shape, model.config.vocab_size), make_pool(shape, programs["policy"].description)
    samples = batch.query_start[1:].astype(np.int64) - 1
    programs["1"].run(batch, pool, samples)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            turn = POLICY_TURN if name == "policy" else FIXED_TURN
            times[name] += timed_steps(lambda run=program.run: run(batch, pool, samples), turn)
    return {name: statistics.fmean(steps) for name, steps in times.items()}


def timed_steps(step: Callable[[], Any], turn: float) -> list[float]:
    """Run steps for at least `turn` seconds. Returns the seconds of each."""
    times: list[float] = []
    while sum(times) < turn:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
