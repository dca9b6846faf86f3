"""Measures hfpaged on the GPU against stock generate() and stock continuous batching, all in one run.

    python tests/gpu/measure.py --json figures.json

Writes JSON as it goes, so that whatever ends it leaves what was measured, and prints a table in the end. What fails is
noted in its place, and what there is no time for is left out. `--dry-run` goes the same way with a tiny model on the
stand-in for a GPU, to see that the script works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from gpu.draws import measure_draws
from gpu.shapes import bytes_of_weights, random_model
from internals import workspace_of
from transformers import ContinuousBatchingConfig, PreTrainedModel

import hfpaged
from hfpaged.cli.bench.engines import ENGINES, NEVER_ENDS, Engine, HfContinuousBatching
from hfpaged.cli.bench.workload import BenchRequest

Found = dict[str, Any]


class Case(NamedTuple):
    """`rows` requests of `prompt` tokens, each with `new` tokens to generate."""

    name: str
    rows: int
    prompt: int
    new: int


# Those that say most come first.
CASES = (
    Case("decode, batch 1", 1, 64, 128),
    Case("decode, batch 8", 8, 64, 128),
    Case("decode, batch 64", 64, 64, 128),
    Case("decode, batch 256", 256, 64, 64),
    Case("prefill, 8k", 1, 8000, 1),
)
SECONDS_OF_ONE_ENGINE = 6.0
STATS = ("backend", "steps", "steps_ahead", "captured_steps", "capture_problem", "capture_breaks", "tier_refusals")
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


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or why it failed: one failure must not cost the other figures."""
    try:
        return function(*arguments)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:200]}
    finally:
        # One engine's cached memory is the next one's.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure_engine(kind: type[Engine], model: PreTrainedModel, case: Case, turns: int) -> dict[str, Any]:
    """Median seconds of several turns, or of as many as take a few seconds, and tokens per second."""
    vocabulary = model.config.vocab_size
    taken: list[float] = []
    with kind(model) as engine:
        warming_up = seconds_of(engine, model, workload(case, vocabulary, seed=999))
        while len(taken) < turns and (not taken or sum(taken) < SECONDS_OF_ONE_ENGINE):
            taken.append(seconds_of(engine, model, workload(case, vocabulary, len(taken))))
        stats = engine.stats()
    median = sorted(taken)[len(taken) // 2]
    found = {"seconds": median, "turns": len(taken), "warm_up_seconds": warming_up, **throughput(case, median)}
    return found | {"stats": {key: stats[key] for key in STATS if key in stats}}


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
        tier = workspace_of(engine).tier
        spent: list[float] = []
        if not is_captured:
            tier.captured.forget()
            tier.captured.forbid("not wanted")
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


def measure(shape: str, device: torch.device, cases: tuple[Case, ...], turns: int, found: Found) -> Iterator[None]:
    """Everything about one model shape, into `found`. Yields whenever there is something new in it."""
    is_dry = device.type != "cuda"
    model = random_model(shape, device, torch.bfloat16)
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation("sdpa")
    steps = 16 if is_dry else 256
    launches = found["launches"] = {}
    for name in ("uncaptured", "captured"):
        launches[name] = attempt(measure_launches, model, name == "captured", steps)
        yield
    if "step_us" in launches["captured"]:
        found["achieved_bytes_per_second"] = achieved_bandwidth(model, launches["captured"]["step_us"])
    found["draws"] = attempt(measure_draws, model.config.vocab_size, device)
    if not is_dry:
        found["copy_bytes_per_second"] = attempt(copy_bandwidth, device)
    found["cases"] = [{"case": case.name} for case in cases]
    # Our own figures first: they are what nobody else has.
    for name, kind in engines(is_dry).items():
        for case, row in zip(cases, found["cases"], strict=True):
            row[name] = attempt(measure_engine, kind, model, case, turns)
            print(f"{shape}, {case.name}, {name}: {cell(row, name)}", flush=True)
            yield


def cell(row: dict[str, Any], name: str) -> str:
    """Tokens per second of one engine in one case."""
    if name not in row:
        return "no time"
    return f"{row[name]['tokens_per_second']:.0f}" if "tokens_per_second" in row[name] else "failed"


def print_table(results: list[Found]) -> None:
    """The JSON's content for people."""
    for result in results:
        print(f"\n{result['shape']}, bfloat16")
        for name, launch in result.get("launches", {}).items():
            if "failed" in launch:
                print(f"  {name:12} failed: {launch['failed']}")
            else:
                print(f"  {name:12} {launch['launch_us']:8.0f} us to launch a step, {launch['step_us']:8.0f} us a step")
        achieved, copied = result.get("achieved_bytes_per_second"), result.get("copy_bytes_per_second")
        if achieved:
            share = f", {100 * achieved / copied:.0f} % of a copy's" if isinstance(copied, float) else ""
            print(f"  weights read at {achieved / 1e9:.3g} GB/s{share}")
        for rows, ways in result.get("draws", {}).items():
            shown = ways if isinstance(ways, str) else ", ".join(f"{one:.0f} us {name}" for name, one in ways.items())
            print(f"  draws, {rows}: {shown}")
        names = list(ENGINES)
        print(f"  {'tokens/s':20}" + "".join(f"{name:>14}" for name in names))
        for row in result.get("cases", []):
            print(f"  {row['case']:20}" + "".join(f"{cell(row, name):>14}" for name in names))
            for name in names:
                if "failed" in row.get(name, {}):
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
    parser.add_argument("--seconds", type=float, default=200, help="begin nothing more after so many")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, on the stand-in for a GPU")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("no CUDA device; see --dry-run", file=sys.stderr)
        return 2
    shapes = ["tiny"] if arguments.dry_run else arguments.shapes.split(",")
    cases = DRY_CASES if arguments.dry_run else CASES
    results: list[Found] = [{"shape": shape} for shape in shapes]
    about = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "stand-in",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hfpaged": hfpaged.__version__,
        "results": results,
    }
    ends = time.monotonic() + arguments.seconds
    with machine(arguments.dry_run) as device, torch.no_grad():
        parts = (measure(found["shape"], device, cases, arguments.turns, found) for found in results)
        for _ in itertools.chain.from_iterable(parts):
            arguments.json.write_text(json.dumps(about, indent=1))
            if time.monotonic() > ends:
                break
    print_table(results)
    print(f"\nwritten to {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
