"""Time the engine beside Transformers' own ways to generate, in one process on one loaded model.

The engines take turns (A B C, A B C, ...) and the table shows medians. Every request is greedy and ignores
end-of-sequence, so all engines generate the same number of tokens, which is checked. Each turn starts warm and with
an empty prefix cache.

kinds of workload:
  mixed   prompts of 16 to 256 words, 8 to 128 new tokens
  decode  prompts of 12 words, 128 new tokens
  prefix  one document of 1,000 words and different questions, 32 new tokens
  single  one request of 64 prompt tokens and 128 new ones
  long    prompts of 2,000 to 6,000 words, 64 new tokens

With --url the workload goes to a running server instead, and the table has latencies as its clients see them.

--latency adds when the tokens came, for engines that hand them out one by one. --profile runs no workload but steps of
the CPU step program: of growing batches, contexts and prompts, by operation, against the machine's measured peaks; and
then steps of the engine with more and more requests waiting.

A workload file is a JSON list of {"prompt_token_ids": [...], "max_new_tokens": n}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpaged.cli.arguments import add_model_options, positive_int
from hfpaged.cli.bench.cpu_meter import DISTURBED_CORES, CpuMeter, is_disturbed
from hfpaged.cli.bench.engines import ENGINES, Engine, Hfpaged
from hfpaged.cli.bench.latency import latency_table
from hfpaged.cli.bench.measure import Measurement, measure
from hfpaged.cli.bench.peaks import measure_peaks
from hfpaged.cli.bench.profile import SHAPES, Profiler, profile_rows, profile_table
from hfpaged.cli.bench.queues import QUEUES, profile_queue, queue_rows, queue_table
from hfpaged.cli.bench.report import Setting, json_lines, table, write_json
from hfpaged.cli.bench.server import run_server
from hfpaged.cli.bench.workload import KINDS, BenchRequest, make_workload, read_workload
from hfpaged.config import TIERS
from hfpaged.errors import InputError
from hfpaged.models.loading import load, load_tokenizer, resolve, set_threads

NAME = "bench"
SUMMARY = "time the engine beside Transformers' own ways to generate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, default_dtype="bfloat16")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workload", type=Path, metavar="FILE.json", help="run the requests in this file")
    source.add_argument("--kind", choices=tuple(KINDS), help="make a workload")
    source.add_argument("--profile", action="store_true", help="where the time of single steps goes")
    parser.add_argument(
        "--requests", type=positive_int, default=64, metavar="N", help="with --kind (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="with --kind (default: %(default)s)")
    parser.add_argument(
        "--engines",
        type=engine_names,
        default=tuple(ENGINES),
        metavar="A,B",
        help=f"in their order (default: {','.join(ENGINES)})",
    )
    parser.add_argument(
        "--tiers", type=tier_names, default=("auto",), metavar="A,B", help="run hfpaged on these tiers (default: auto)"
    )
    parser.add_argument("--url", metavar="URL", help="time this OpenAI-compatible server instead; --model tokenizes")
    parser.add_argument(
        "--concurrency", type=positive_int, default=64, metavar="N", help="with --url: requests at a time (%(default)s)"
    )
    parser.add_argument("--repeat", type=positive_int, default=3, metavar="N", help="turns (default: %(default)s)")
    parser.add_argument("--latency", action="store_true", help="also time every token")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write one JSON line for each engine here")


def run(args: argparse.Namespace) -> int:
    """Returns 0; an engine that fails raises."""
    # Transformers warns at every request about the end-of-sequence id that never comes, which is meant here.
    transformers.logging.set_verbosity_error()
    if args.url is not None:
        if args.profile:
            raise InputError("--profile runs in this process; it has no --url")
        return run_against_server(args)
    threads = set_threads(args.threads)
    model, tokenizer, label = load(args.model, args.dtype)
    if args.profile:
        return run_profile(args, model, threads)
    work = requests(args, tokenizer)
    engines = make_engines(args, model)
    for engine in engines:
        engine.watches_tokens = args.latency
    measurements = measure(engines, work, args.repeat, progress=lambda line: print(line, file=sys.stderr))
    setting = Setting.of(work, label, args.dtype, threads)
    if args.json is not None:
        write_json(args.json, json_lines(setting, measurements))
    print(table(setting, measurements))
    if args.latency:
        print(latency_table([(one.engine, one.latency) for one in measurements if one.latency is not None]))
    warn_if_disturbed(measurements)
    return 0


def run_against_server(args: argparse.Namespace) -> int:
    """Time the server at --url; its API key is in OPENAI_API_KEY. Returns 0."""
    tokenizer = load_tokenizer(resolve(args.model)[0])
    work = requests(args, tokenizer)
    print(run_server(args.url, work, args.concurrency, os.environ.get("OPENAI_API_KEY")).table())
    return 0


def run_profile(args: argparse.Namespace, model: PreTrainedModel, threads: int) -> int:
    """Profile steps. Returns 0; a model without a step program raises."""
    meter = CpuMeter()
    peaks = measure_peaks(model.dtype, threads)
    profiler = Profiler(model, threads, peaks)
    profiles, queues = [], []
    for shape in SHAPES:
        profiles.append(profiler.run(shape))
        print(f"{shape}: {1e3 * profiles[-1].seconds:.2f} ms", file=sys.stderr)
    for waiting in QUEUES:
        queues.append(profile_queue(model, waiting))
        print(f"{waiting} waiting: {1e3 * queues[-1].seconds:.2f} ms", file=sys.stderr)
    if args.json is not None:
        rows = [*profile_rows(peaks, profiles), *queue_rows(queues)]
        write_json(args.json, "".join(json.dumps(row) + "\n" for row in rows))
    print(profile_table(peaks, profiles))
    print(queue_table(queues))
    warn(["the steps"] if is_disturbed(meter.foreign_cores()) else [])
    return 0


def make_engines(args: argparse.Namespace, model: PreTrainedModel) -> list[Engine]:
    """The engines that the arguments name, hfpaged once for each tier."""
    engines: list[Engine] = []
    for name in args.engines:
        if name == Hfpaged.name:
            engines += [Hfpaged(model, tier) for tier in args.tiers]
        else:
            engines.append(ENGINES[name](model))
    return engines


def engine_names(text: str) -> tuple[str, ...]:
    """An argparse type: a comma-separated list of ENGINES."""
    return _names(text, "engine", ENGINES)


def tier_names(text: str) -> tuple[str, ...]:
    """An argparse type: a comma-separated list of TIERS."""
    return _names(text, "tier", TIERS)


def _names(text: str, kind: str, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {kind} {unknown[0]!r}; known: {', '.join(known)}")
    return names


def requests(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[BenchRequest]:
    """The workload that the arguments name."""
    if args.workload is not None:
        return read_workload(args.workload)
    return make_workload(args.kind, lambda text: tokenizer(text)["input_ids"], args.requests, args.seed)


def warn_if_disturbed(measurements: Sequence[Measurement]) -> None:
    """Say on stderr which engines' times another process may have spoilt."""
    warn([measurement.engine for measurement in measurements if measurement.disturbed])


def warn(disturbed: Sequence[str]) -> None:
    """Say on stderr that other processes may have spoilt these times, if there are any."""
    if disturbed:
        print(
            f"hfpaged: warning: other processes took more than {DISTURBED_CORES} cores while {', '.join(disturbed)} "
            "ran; repeat on an idle machine before quoting these times",
            file=sys.stderr,
        )
