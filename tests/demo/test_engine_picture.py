"""The picture of the engine: block map, chart, panel, and who gets it how often."""

from __future__ import annotations

import re

import pytest
from engine.hooks import paused, used_blocks

from hfpaged.core.snapshot import BooksSnapshot, RequestSnapshot
from hfpaged.demo.block_map import COLUMNS, block_map
from hfpaged.demo.engine_view import engine_view
from hfpaged.demo.engine_watch import EngineWatch
from hfpaged.demo.rate_chart import RateHistory, rate_chart

LONG = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": 300}


def books(references, cached, tables):
    requests = tuple(
        RequestSnapshot(number, "running", 20, 30, 29, 60, False, tuple(table)) for number, table in tables.items()
    )
    return BooksSnapshot(len(references), 16, bytes(references), bytes(cached), len(requests), requests)


def cells(svg, look):
    """(column, row) of each cell of a look."""
    found = re.search(rf'<path class="{look}" d="([^"]*)"', svg)
    return [] if found is None else [tuple(map(int, cell)) for cell in re.findall(r"M(\d+) (\d+)", found[1])]


def test_each_block_has_the_look_of_what_it_is():
    references = [2, 1, 1, 1] + [0] * COLUMNS
    cached = [1, 0, 0, 0, 1] + [0] * (COLUMNS - 1)
    svg = block_map(books(references, cached, {3: [0, 1], 14: [0, 2]}))
    assert cells(svg, "held owner-3") == [(0, 0), (10, 0)]
    assert cells(svg, "held owner-4") == [(20, 0)]
    assert cells(svg, "held") == [(30, 0)]  # its request is beyond those that are shown
    assert cells(svg, "shared") == [(3, 3)]
    assert cells(svg, "kept") == [(40, 0)]
    assert len(cells(svg, "free")) == COLUMNS + 4 and cells(svg, "free")[-1] == (30, 10)
    assert "4 held, 1 of them shared, 1 cached and free" in svg


def test_a_full_map_stays_small():
    count = 32 * COLUMNS
    svg = block_map(books([1] * count, [0] * count, {number: range(number, count, 32) for number in range(32)}))
    assert len(svg) < 100_000


def test_rates_are_those_of_each_second():
    history = RateHistory()
    for tenth in range(0, 1000):
        now = tenth / 10
        history.add(now, round(20 * min(now, 90.0)))  # 20 a second, and nothing in the last ten
    rates = history.rates(100.0)
    assert len(rates) == 60
    assert rates[0] == pytest.approx(20, abs=0.5) and rates[45] == pytest.approx(20, abs=0.5)
    assert rates[55] == 0
    assert len(history._seen) < 700


def test_rates_before_the_first_look_are_zero():
    history = RateHistory()
    assert history.rates(5.0) == [0.0] * 60
    history.add(5.0, 1000)
    assert history.rates(5.0) == [0.0] * 60
    assert "10 tokens/s" in rate_chart([0.0] * 60)


def test_the_panel_shows_what_runs(host):
    with_nothing = engine_view(host.engine.snapshot(), [0.0] * 60)
    assert "Nothing runs" in with_nothing
    handles = [host.engine.submit([5] * 40, **LONG) for _ in range(2)]
    next(iter(handles[-1]))
    with paused(host.engine):
        held = used_blocks(host.engine)
    seen = engine_view(host.engine.snapshot(), [0.0] * 60)
    for handle in handles:
        assert f"#{handle.request_id}<" in seen
        handle.cancel()
    assert held >= 4 and re.search(r"96 blocks of 16 tokens, \d+ held", seen)
    assert '<path class="shared"' in seen


def test_before_the_first_request_there_is_a_panel_too(shared_host):
    empty = shared_host.engine.snapshot()._replace(books=())
    assert "Tokens a second" in engine_view(empty, [0.0] * 60)


def test_one_picture_serves_all_who_watch(host, monkeypatch):
    watch = EngineWatch(host.engine)
    made = []
    snapshot = host.engine.snapshot
    monkeypatch.setattr(host.engine, "snapshot", lambda **limits: made.append(1) or snapshot(**limits))
    pictures = [watch.look(f"visitor {number}") for number in range(50)]
    assert len(made) == 1
    assert len({picture.html for picture in pictures}) == 1
    assert pictures[0].seconds == pytest.approx(0.4) and pictures[-1].seconds == pytest.approx(2.0)
    assert watch.look("visitor 49").html is None


def test_who_has_gone_is_forgotten(host, monkeypatch):
    import hfpaged.demo.engine_watch as module

    watch = EngineWatch(host.engine)
    for number in range(50):
        watch.look(f"visitor {number}")
    now = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 60)
    assert watch.look("another").seconds == pytest.approx(0.4)
