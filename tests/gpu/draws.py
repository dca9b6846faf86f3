"""Rows that sample in all ways at once, to draw for and to time."""

from __future__ import annotations

import time

import torch

from hfpaged.runtime.device.draw_launch import DrawFunction, choose_draw
from hfpaged.sampling.device_draw import draw_on_device
from hfpaged.sampling.draw_table import IS_SAMPLED, MIN_P, NUM_NUMBERS, REST, TEMPERATURE, TOP_K, UNIFORM

ROWS = (1, 8, 64, 256)
_TURNS = 20


def mixture(rows: int, vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits in bfloat16, their argmax, and parameters: temperature, top_k, top_p and min_p, in some rows each."""
    generator = torch.Generator(device).manual_seed(3)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator, device=device).bfloat16()
    index = torch.arange(rows, device=device)
    numbers = torch.zeros(NUM_NUMBERS, rows, dtype=torch.float64, device=device)
    numbers[TEMPERATURE] = 0.6 + 0.1 * (index % 9)
    numbers[TOP_K] = torch.where(index % 2 == 0, 50.0, torch.zeros(rows, device=device)).double()
    numbers[REST] = torch.where(index % 4 < 3, 0.1, torch.full((rows,), -1.0, device=device)).double()
    numbers[MIN_P] = 0.02 * (index % 5 == 0)
    numbers[UNIFORM] = torch.rand(rows, generator=generator, dtype=torch.float64, device=device)
    numbers[IS_SAMPLED] = 1
    return logits, logits.argmax(-1), numbers


def measure_draws(vocabulary: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds to draw for some numbers of rows, all of which sample: by the chosen way, and by sorting."""
    ways = {"chosen": choose_draw(device, torch.bfloat16).function, "sorting": draw_on_device}
    return {
        f"{rows} rows": {name: _microseconds(way, mixture(rows, vocabulary, device)) for name, way in ways.items()}
        for rows in ROWS
    }


def _microseconds(way: DrawFunction, arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
    def wait() -> None:
        if arguments[0].device.type == "cuda":
            torch.cuda.synchronize()

    way(*arguments)
    wait()
    began = time.perf_counter()
    for _ in range(_TURNS):
        way(*arguments)
    wait()
    return 1e6 * (time.perf_counter() - began) / _TURNS
