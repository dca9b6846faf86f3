"""Choosing how a device draws: by the kernel that sorts nothing, where it runs and draws the same, or by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch

from hfpaged.runtime.attention.triton_probe import machine_problem
from hfpaged.sampling.device_draw import draw_on_device
from hfpaged.sampling.draw_table import IS_SAMPLED, MIN_P, NUM_NUMBERS, REST, TEMPERATURE, TOP_K, UNIFORM

# (logits [N, V], argmax int64 [N], numbers float64 [NUM_NUMBERS, N]) -> tokens int64 [N].
DrawFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Scores that a program reads at a time, and thresholds that it tries meanwhile: 2 bits' worth.
BLOCK, BITS = 4096, 2
WARPS = 16
_TRIAL_ROWS, _TRIAL_VOCABULARY = 32, 9001


def draw_by_kernel(logits: torch.Tensor, argmax: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """See `draw_on_device`, with the same result up to the rounding of sums at top_p's cut."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens = torch.empty_like(argmax)
    kernels().draw_kernel[(len(logits),)](
        logits, argmax, numbers, tokens, logits.shape[1], len(logits), logits.stride(0),
        BLOCK=BLOCK, WAYS=1 << BITS, BITS=BITS, num_warps=WARPS,
    )  # fmt: skip
    return tokens


class DrawChoice(NamedTuple):
    """How a device draws, and why not by the kernel."""

    function: DrawFunction
    problem: str | None


def choose_draw(device: torch.device, dtype: torch.dtype) -> DrawChoice:
    """How a device draws from logits in `dtype`.

    Waits for the device. What was found is not looked for again in this process.
    """
    problem = machine_problem(device, dtype) or _trial_problem(device, dtype)
    return DrawChoice(draw_by_kernel if problem is None else draw_on_device, problem)


@lru_cache(maxsize=16)
def _trial_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator(device).manual_seed(1)
    shape, double = (_TRIAL_ROWS, _TRIAL_VOCABULARY), torch.float64
    logits = (4 * torch.randn(shape, generator=generator, device=device)).to(dtype)
    rows = torch.arange(_TRIAL_ROWS, device=device)
    numbers = torch.zeros(NUM_NUMBERS, _TRIAL_ROWS, dtype=double, device=device)
    numbers[TEMPERATURE] = 0.7 + 0.05 * rows
    numbers[TOP_K] = 40.0 * (rows % 2)
    numbers[REST] = 1.2 * (rows // 2 % 2) - 1.0
    numbers[MIN_P] = 0.01 * (rows // 4 % 2)
    numbers[UNIFORM] = torch.rand(_TRIAL_ROWS, generator=generator, dtype=double, device=device)
    numbers[IS_SAMPLED] = 1.0 * (rows % 8 != 6)
    argmax = logits.argmax(dim=-1)
    try:
        if bool((draw_by_kernel(logits, argmax, numbers) == draw_on_device(logits, argmax, numbers)).all()):
            return None
    except Exception as error:  # a compiler, a driver: whatever it is, PyTorch draws
        return f"the kernel does not run here ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    return "the kernel draws other tokens"


@lru_cache(maxsize=1)
def kernels() -> ModuleType:
    """The kernel's module, which imports Triton."""
    from hfpaged.runtime.device import draw_kernels

    return draw_kernels
