"""Show measurements as JSON lines and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hfpaged.cli.bench.measure import Measurement
from hfpaged.cli.bench.workload import BenchRequest
from hfpaged.errors import InputError


@dataclass(frozen=True)
class Setting:
    """What all engines of a benchmark ran on."""

    model: str
    dtype: str
    threads: int
    requests: int
    prompt_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, work: Sequence[BenchRequest], model: str, dtype: str, threads: int) -> Setting:
        prompt_tokens = sum(len(request.prompt_token_ids) for request in work)
        return cls(model, dtype, threads, len(work), prompt_tokens, sum(request.max_new_tokens for request in work))


def json_lines(setting: Setting, measurements: Sequence[Measurement]) -> str:
    """One JSON object a line for each engine; `seconds` is the median of `all_seconds`."""
    rows = [
        {
            "engine": measurement.engine,
            **vars(setting),
            "seconds": round(measurement.median, 3),
            "output_tokens_per_s": round(setting.output_tokens / measurement.median, 1),
            "all_seconds": [round(seconds, 3) for seconds in measurement.seconds],
            "foreign_cores": [None if cores is None else round(cores, 3) for cores in measurement.foreign_cores],
            "latency_ms": None if measurement.latency is None else asdict(measurement.latency),
            "stats": measurement.stats,
        }
        for measurement in measurements
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(setting: Setting, measurements: Sequence[Measurement]) -> str:
    """A table of median times, with each engine's speed as a multiple of the slowest one's."""
    slowest = max(measurement.median for measurement in measurements)
    lines = [
        f"{setting.model}, {setting.dtype}, {setting.threads} threads: {setting.requests} requests, "
        f"{setting.prompt_tokens} prompt and {setting.output_tokens} output tokens",
        f"{'engine':<12}{'median s':>10}{'min s':>10}{'max s':>10}{'tokens/s':>11}{'ratio':>8}",
    ]
    for measurement in measurements:
        seconds = measurement.seconds
        rate = setting.output_tokens / measurement.median
        lines.append(
            f"{measurement.engine:<12}{measurement.median:>10.2f}{min(seconds):>10.2f}{max(seconds):>10.2f}"
            f"{rate:>11.1f}{slowest / measurement.median:>8.2f}"
        )
    return "\n".join(lines)


def write_json(path: Path, text: str) -> None:
    """Write a report, or raise InputError where the path cannot be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from error
