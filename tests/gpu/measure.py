"""Measures hfpaged on the GPU against stock generate() and stock continuous batching, all in one run.

    python tests/gpu/measure.py --json figures.json

Prints a table and writes the same as JSON. `--dry-run` goes the same way with a tiny model on the stand-in for a GPU,
to see that the script works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from gpu.shapes import bytes_of_weights, random_model
from transformers import ContinuousBatchingConfig, PreTrainedModel

import hfpaged
from hfpaged.cli.bench.engines import ENGINES, NEVER_ENDS, Engine, HfContinuousBatching
from hfpaged.cli.bench.workload import BenchRequest


class Case(NamedTuple):
    """`rows` requests of `prompt` tokens, each with `new` tokens to generate."""

    name: str
    rows: int
    prompt: int
    new: int


CASES = (
    Case("decode, batch 1", 1, 64, 128),
    Case("decode, batch 8", 8, 64, 128),
    Case("decode, batch 64", 64, 64, 128),
    Case("decode, batch 256", 256, 64, 64),
    Case("prefill, 8k", 1, 8000, 1),
)
DRY_CASES = (Case("decode, batch 1", 1, 16, 8), Case("decode, batch 3", 3, 16, 8), Case("prefill", 1, 100, 1))


class HfContinuousBatchingAsIs(HfContinuousBatching):
    """With Transformers' own choice of pages and limits, which are made for GPUs."""

    def _config(self, work: Any) -> ContinuousBatchingConfig:
        return ContinuousBatchingConfig()


def engines(is_dry: bool) -> dict[str, type[Engine]]:
    """By the name in the table."""
    chosen = dict(ENGINES)
    if not is_dry:
        chosen["hf-cb"] = HfContinuousBatchingAsIs
    return chosen


def workload(case: Case, vocabulary: int, seed: int) -> list[BenchRequest]:
    """Random prompts, so that no two share a prefix."""
    source = random.Random(seed)
    return [
        BenchRequest([source.randrange(3, vocabulary) for _ in range(case.prompt)], case.new) for _ in range(case.rows)
    ]


def synchronize(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(engine: Engine, model: PreTrainedModel, work: list[BenchRequest]) -> float:
    """One timed turn; fails if the engine generated another number of tokens than asked."""
    synchronize(model)
    began = time.perf_counter()
    lengths = engine.run(work)
    synchronize(model)
    taken = time.perf_counter() - began
    if lengths != [request.max_new_tokens for request in work]:
        raise RuntimeError(f"{engine.name} generated {lengths}")
    return taken


def measure_case(model: PreTrainedModel, case: Case, turns: int, is_dry: bool) -> dict[str, Any]:
    """Median seconds and tokens per second of each engine; what failed is said instead."""
    row: dict[str, Any] = {"case": case.name}
    vocabulary = model.config.vocab_size
    for name, kind in engines(is_dry).items():
        try:
            with kind(model) as engine:
                seconds_of(engine, model, workload(case, vocabulary, seed=999))
                taken = sorted(
                    seconds_of(engine, model, workload(case, vocabulary, seed)) for seed in range(turns)
                )[turns // 2]
                row[name] = {"seconds": taken, **throughput(case, taken)}
                if name == "hfpaged":
                    row["stats"] = {
                        key: engine.stats()[key]
                        for key in ("backend", "steps", "steps_ahead", "captured_steps", "capture_problem")
                    }
        except Exception as error:  # one engine's failure must not cost the figures of the others
            row[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    return row


def throughput(case: Case, seconds: float) -> dict[str, float]:
    """Tokens per second of whatever the case is about."""
    tokens = case.rows * (case.prompt if case.new == 1 else case.new)
    return {"tokens_per_second": tokens / seconds}


def measure_launches(model: PreTrainedModel, is_captured: bool, steps: int) -> dict[str, float]:
    """Microseconds that the host spends per decode step of one request, in all and in launching the forward."""
    with hfpaged.patched(model):
        engine = hfpaged.engine(model)
        options = {"do_sample": False, "eos_token_id": NEVER_ENDS}
        engine.submit([5, 6, 7], max_new_tokens=8, **options).result()
        tier = engine._stepper.workspaces.current.tier
        spent: list[float] = []
        if not is_captured:
            tier.captured.forget()
            tier.captured.problem = "not wanted"
        run = tier.run

        def timed(batch: Any, want_logits: bool) -> Any:
            began = time.perf_counter()
            output = run(batch, want_logits)
            spent.append(time.perf_counter() - began)
            return output

        tier.run = timed
        began = time.perf_counter()
        engine.submit([5, 6, 7], max_new_tokens=steps, **options).result()
        taken = time.perf_counter() - began
        del tier.run
    return {"step_us": 1e6 * taken / steps, "launch_us": 1e6 * sorted(spent)[len(spent) // 2]}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that the card moves when it does nothing else: a large copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        target.copy_(source)
    torch.cuda.synchronize()
    return 20 * 2 * source.numel() / (time.perf_counter() - began)


def achieved_bandwidth(model: PreTrainedModel, step_us: float) -> float:
    """Bytes of weights that a decode step of one request reads, per second."""
    return bytes_of_weights(model) / (step_us * 1e-6)


def measure(shape: str, device: torch.device, cases: tuple[Case, ...], turns: int) -> dict[str, Any]:
    """Everything about one model shape."""
    is_dry = device.type != "cuda"
    model = random_model(shape, device, torch.bfloat16)
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation("sdpa")
    steps = 16 if is_dry else 256
    launches = {name: measure_launches(model, name == "captured", steps) for name in ("uncaptured", "captured")}
    found: dict[str, Any] = {
        "shape": shape,
        "launches": launches,
        "achieved_bytes_per_second": achieved_bandwidth(model, launches["captured"]["step_us"]),
        "cases": [measure_case(model, case, turns, is_dry) for case in cases],
    }
    if not is_dry:
        found["copy_bytes_per_second"] = copy_bandwidth(device)
    return found


def print_table(results: list[dict[str, Any]]) -> None:
    """The JSON's content for people."""
    for result in results:
        print(f"\n{result['shape']}, bfloat16")
        for name, launch in result["launches"].items():
            print(f"  {name:12} {launch['launch_us']:8.0f} us to launch a step, {launch['step_us']:8.0f} us a step")
        achieved, copied = result["achieved_bytes_per_second"], result.get("copy_bytes_per_second")
        share = f", {100 * achieved / copied:.0f} % of a copy's" if copied else ""
        print(f"  weights read at {achieved / 1e9:.3g} GB/s{share}")
        names = list(ENGINES)
        print(f"  {'tokens/s':20}" + "".join(f"{name:>14}" for name in names))
        for row in result["cases"]:
            cells = [row[name].get("tokens_per_second") for name in names]
            print(f"  {row['case']:20}" + "".join(f"{'failed' if c is None else f'{c:.0f}':>14}" for c in cells))
            for name in names:
                if "failed" in row[name]:
                    print(f"      {name}: {row[name]['failed']}")


@contextlib.contextmanager
def machine(is_dry: bool) -> Iterator[torch.device]:
    """The GPU, or the stand-in for one."""
    if not is_dry:
        yield torch.device("cuda")
        return
    from standin.machine import stand_in

    with stand_in():
        yield torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-figures.json"), help="where to write the figures")
    parser.add_argument("--shapes", default="smollm2-135m,llama-3-8b", help="of the models, with commas in between")
    parser.add_argument("--turns", type=int, default=3, help="timed turns of each case; the median counts")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, on the stand-in for a GPU")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("no CUDA device; see --dry-run", file=sys.stderr)
        return 2
    shapes = ["tiny"] if arguments.dry_run else arguments.shapes.split(",")
    cases = DRY_CASES if arguments.dry_run else CASES
    with machine(arguments.dry_run) as device, torch.no_grad():
        results = [measure(shape, device, cases, arguments.turns) for shape in shapes]
    print_table(results)
    about = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "stand-in",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hfpaged": hfpaged.__version__,
        "results": results,
    }
    arguments.json.write_text(json.dumps(about, indent=1))
    print(f"\nwritten to {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
