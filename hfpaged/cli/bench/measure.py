"""Time engines over one workload in turn, so that a change in the machine meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfpaged.cli.bench.cpu_meter import CpuMeter, is_disturbed
from hfpaged.cli.bench.engines import Engine, EngineFailure
from hfpaged.cli.bench.latency import Latency
from hfpaged.cli.bench.workload import BenchRequest


@dataclass
class Measurement:
    """One engine's turns: seconds each, cores other processes took in each, its statistics and latency of the last."""

    engine: str
    seconds: list[float] = field(default_factory=list)
    foreign_cores: list[float | None] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    latency: Latency | None = None

    @property
    def median(self) -> float:
        """Of the seconds of all turns."""
        return statistics.median(self.seconds)

    @property
    def disturbed(self) -> bool:
        """Whether other processes were busy in one of the turns."""
        return any(map(is_disturbed, self.foreign_cores))


def measure(
    engines: Sequence[Engine], work: Sequence[BenchRequest], repeat: int, progress: Callable[[str], None]
) -> list[Measurement]:
    """Run each engine `repeat` times in the order A B C A B C, after an untimed warm-up in each turn.

    Raises:
        EngineFailure: an engine generated another number of tokens than the workload asks for.
    """
    measurements = [Measurement(engine.name) for engine in engines]
    for turn in range(repeat):
        for engine, measurement in zip(engines, measurements, strict=True):
            with engine:
                engine.warm_up(work)
                meter = CpuMeter()
                start = time.perf_counter()
                lengths = engine.run(work)
                seconds = time.perf_counter() - start
                measurement.foreign_cores.append(meter.foreign_cores())
                measurement.seconds.append(seconds)
                measurement.stats = engine.stats()
                measurement.latency = Latency.of(engine.token_times) if engine.token_times else None
            check_lengths(engine.name, lengths, work)
            progress(f"turn {turn + 1} of {repeat}: {engine.name} {seconds:.2f} s")
    return measurements


def check_lengths(name: str, lengths: Sequence[int], work: Sequence[BenchRequest]) -> None:
    """Raise EngineFailure unless every request got as many tokens as it asked for."""
    for index, (length, request) in enumerate(zip(lengths, work, strict=True)):
        if length != request.max_new_tokens:
            raise EngineFailure(f"{name}: request {index} got {length} tokens, not {request.max_new_tokens}")
