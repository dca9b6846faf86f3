from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedModel

from hfpaged.cli.bench import cpu_meter
from hfpaged.cli.bench.command import make_engines
from hfpaged.cli.bench.engines import ENGINES, Engine, EngineFailure
from hfpaged.cli.bench.latency import Latency, TokenTimes, latency_table
from hfpaged.cli.bench.measure import Measurement, check_lengths, measure
from hfpaged.cli.bench.peaks import Peaks
from hfpaged.cli.bench.profile import Profiler, StepShape, profile_table
from hfpaged.cli.bench.queues import profile_queue, queue_table
from hfpaged.cli.bench.report import Setting, json_lines, table
from hfpaged.cli.bench.workload import BenchRequest
from hfpaged.cli.main import main
from hfpaged.patched_model import is_patched

WORK = [BenchRequest([5, 6, 7, 8], 6), BenchRequest([9, 10], 3), BenchRequest(list(range(20, 60)), 9)]


class RecordingEngine(Engine):
    """Notes when its turn starts, what it runs and when the turn ends."""

    def __init__(self, name: str, log: list[str], short_by: int = 0):
        super().__init__(SimpleNamespace())
        self.name, self._log, self._short_by = name, log, short_by

    def __enter__(self) -> Engine:
        self._log.append(f"{self.name} in")
        return self

    def __exit__(self, *_: object) -> None:
        self._log.append(f"{self.name} out")

    def run(self, work: Sequence[BenchRequest]) -> list[int]:
        self._log.append(f"{self.name} {len(work)}")
        return [request.max_new_tokens - self._short_by for request in work]


def test_engines_take_turns_and_each_turn_starts_with_a_warm_up() -> None:
    log: list[str] = []
    measurements = measure([RecordingEngine("a", log), RecordingEngine("b", log)], WORK, 2, progress=lambda _: None)
    turn = ["a in", "a 1", "a 3", "a out", "b in", "b 1", "b 3", "b out"]
    assert log == turn * 2
    assert [len(measurement.seconds) for measurement in measurements] == [2, 2]


def test_an_engine_that_generates_too_few_tokens_is_not_timed_in_silence() -> None:
    with pytest.raises(EngineFailure, match="a: request 0 got 5 tokens, not 6"):
        measure([RecordingEngine("a", [], short_by=1)], WORK, 1, progress=lambda _: None)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_generates_as_many_tokens_as_asked(name: str, tiny_model: Callable[..., PreTrainedModel]) -> None:
    engine = ENGINES[name](tiny_model("llama"))
    with engine:
        check_lengths(name, engine.run(WORK), WORK)


def test_hfpaged_runs_on_each_tier_that_is_named(tiny_model: Callable[..., PreTrainedModel]) -> None:
    arguments = SimpleNamespace(engines=("hf-static", "hfpaged"), tiers=("leaves", "auto"))
    engines = make_engines(arguments, tiny_model("llama"))
    assert [engine.name for engine in engines] == ["hf-static", "hfpaged, leaves", "hfpaged"]
    with engines[1] as engine:
        check_lengths(engine.name, engine.run(WORK), WORK)
        assert engine.stats()["tier"] == "leaves"


def test_each_turn_of_hfpaged_starts_with_an_empty_prefix_cache(tiny_model: Callable[..., PreTrainedModel]) -> None:
    engine = ENGINES["hfpaged"](tiny_model("llama"))
    for _ in range(2):
        with engine:
            engine.run(WORK)
            assert engine.stats()["cached_prompt_tokens"] == 0


def measurement(engine: str, seconds: list[float], foreign: float | None = 0.0) -> Measurement:
    return Measurement(engine, seconds, [foreign] * len(seconds))


SETTING = Setting.of(WORK, "tiny", "float32", 2)


def test_the_table_gives_medians_rates_and_ratios_to_the_slowest() -> None:
    lines = table(SETTING, [measurement("fast", [1.0, 9.0, 2.0]), measurement("slow", [8.0])]).splitlines()
    assert lines[2].split() == ["fast", "2.00", "1.00", "9.00", "9.0", "4.00"]
    assert lines[3].split() == ["slow", "8.00", "8.00", "8.00", "2.2", "1.00"]


def test_json_lines_carry_every_turn_and_the_setting() -> None:
    row = json.loads(json_lines(SETTING, [measurement("fast", [1.0, 3.0, 2.0], foreign=None)]))
    assert row["seconds"] == 2.0
    assert row["all_seconds"] == [1.0, 3.0, 2.0]
    assert row["foreign_cores"] == [None, None, None]
    assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (3, 46, 18)
    assert row["output_tokens_per_s"] == 9.0


def test_a_measurement_beside_a_busy_process_counts_as_disturbed() -> None:
    assert measurement("a", [1.0], foreign=0.5).disturbed
    assert not measurement("a", [1.0], foreign=0.01).disturbed
    assert not measurement("a", [1.0], foreign=None).disturbed


def test_the_meter_leaves_out_the_work_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = {"busy": 100.0, "own": 10.0, "clock": 0.0}
    monkeypatch.setattr(cpu_meter, "_machine_busy_seconds", lambda: readings["busy"])
    monkeypatch.setattr(cpu_meter, "_own_seconds", lambda: readings["own"])
    monkeypatch.setattr(time, "perf_counter", lambda: readings["clock"])
    meter = cpu_meter.CpuMeter()
    readings.update(busy=107.0, own=14.0, clock=6.0)
    assert meter.foreign_cores() == pytest.approx(0.5)
    readings["clock"] = 0.01
    assert meter.foreign_cores() is None


def test_bench_prints_a_table_and_writes_json(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, out = tmp_path / "work.json", tmp_path / "out.json"
    work.write_text(json.dumps([request._asdict() for request in WORK]))
    arguments = ["bench", "--model", str(model_directory), "--dtype", "float32", "--workload", str(work)]
    assert main([*arguments, "--repeat", "1", "--engines", "hf-static,hfpaged", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"{model_directory.name}, float32" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["engine"] for row in rows] == ["hf-static", "hfpaged"]
    assert all(row["output_tokens"] == 18 and row["seconds"] > 0 for row in rows)


def test_kind_and_workload_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--kind", "mixed", "--workload", "work.json"])
    assert stop.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_profile_of_a_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--profile", "--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == "hfpaged: error: --profile runs in this process; it has no --url\n"


def test_an_unknown_engine_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--kind", "mixed", "--engines", "hfpaged,other"])
    assert "unknown engine 'other'; known: hfpaged, hf-static, hf-cb" in capsys.readouterr().err


def test_latency_counts_from_submission_and_between_tokens_of_one_request() -> None:
    requests = [TokenTimes(1.0, [1.5, 1.6, 1.8]), TokenTimes(1.0, [2.0])]
    latency = Latency.of(requests)
    assert latency.first[50] == pytest.approx(750.0)
    assert latency.between[50] == pytest.approx(150.0)
    assert latency_table([("a", latency)]).splitlines()[1].split() == ["a", "750.0", "995.0", "150.0", "199.0"]


def test_watched_tokens_arrive_one_after_the_other(tiny_model: Callable[..., PreTrainedModel]) -> None:
    engine = ENGINES["hfpaged"](tiny_model("llama"))
    engine.watches_tokens = True
    with engine:
        assert engine.run(WORK) == [6, 3, 9]
    for times, request in zip(engine.token_times, WORK, strict=True):
        assert len(times.arrivals) == request.max_new_tokens
        assert sorted(times.arrivals) == times.arrivals
        assert times.submitted < times.arrivals[0]


def test_a_profile_accounts_for_the_whole_step(tiny_model: Callable[..., PreTrainedModel]) -> None:
    peaks = Peaks(1e12, 1e12)
    profiler = Profiler(tiny_model("llama"), 1, peaks)
    profile = profiler.run(StepShape(requests=3, new_tokens=2, context=20))
    assert {"attention", "head", "embed", "norm"} <= set(profile.operations)
    assert sum(profile.operations.values()) == pytest.approx(profile.seconds, rel=0.5)
    assert 0 < profile.roofline < 1
    assert profile_table(peaks, [profile]).splitlines()[2].split()[:3] == ["3", "2", "20"]


def test_a_queue_waits_while_the_batch_runs_and_is_cancelled_at_the_end(tiny_model: Callable[..., PreTrainedModel]):
    model = tiny_model("llama")
    profile = profile_queue(model, waiting=5, running=3)
    assert (profile.running, profile.waiting) == (3, 5)
    assert 0 < profile.schedule < profile.seconds
    assert queue_table([profile]).splitlines()[1].split()[:2] == ["3", "5"]
    assert not is_patched(model)
