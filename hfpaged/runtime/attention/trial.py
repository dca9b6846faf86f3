"""Trying a backend before it is chosen: kernels that do not compile, or are wrong here, are a reason, not an error."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch

from hfpaged.runtime.attention.interface import AheadBackend, AttentionParams, LatentShape, LayerShape
from hfpaged.runtime.attention.torch_backend import attend
from hfpaged.runtime.batch import StepBatch

# Relative to the largest number.
_TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-4}


def trial_problem(
    backend_class: type[AheadBackend], device: torch.device, dtype: torch.dtype, shapes: Iterable[LayerShape],
    block_size: int,
) -> str | None:  # fmt: skip
    """What goes wrong when the backend attends with a few tokens of each shape, in one line; None: nothing.

    Waits for the device. What went well is not tried again in this process.
    """
    try:
        for shape in set(shapes):
            _try(backend_class, device, dtype, shape, block_size)
    except Exception as error:  # a compiler, a driver, a library: whatever it is, another backend will do
        return f"its kernels do not run here ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    return None


@lru_cache(maxsize=64)
def _try(
    backend_class: type[AheadBackend], device: torch.device, dtype: torch.dtype, shape: LayerShape, block_size: int
) -> None:
    backend = backend_class(device, dtype, block_size)
    generator = torch.Generator().manual_seed(1)
    dims = (shape.key_dim, shape.key_dim, shape.value_dim)
    query, key, value = (torch.randn(5, shape.num_kv_heads, dim, generator=generator).to(device, dtype) for dim in dims)
    if isinstance(shape, LatentShape):
        value = key[..., : shape.value_dim]
    params = AttentionParams(shape.key_dim**-0.5)
    with torch.no_grad(), backend.accelerator.active():
        kv = backend.allocate(shape, 5)
        # Some tokens at once, then one more, as a prompt and the first step behind it.
        for tokens in (slice(0, 4), slice(4, 5)):
            backend.begin(_batch(tokens, block_size))
            backend.write(kv, key[tokens], value[tokens])
            output = backend.run(kv, query[tokens], params).float()
            wanted = attend(query[tokens], key[: tokens.stop], value[: tokens.stop], params)
            if not (output - wanted).abs().max() <= _TOLERANCE[dtype] * wanted.abs().max():
                raise ArithmeticError("their results are wrong")


def _batch(tokens: slice, block_size: int) -> StepBatch:
    """A request's tokens; it has the blocks from the last of five on."""
    positions = np.arange(tokens.start, tokens.stop)
    table = np.arange(4, -1, -1, dtype=np.int32)[None]
    return StepBatch(
        token_ids=positions,
        positions=positions,
        slots=table[0, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        query_start=np.array([0, len(positions)], dtype=np.int32),
        context_len=np.array([tokens.stop], dtype=np.int32),
        table_rows=np.zeros(1, dtype=np.int32),
        block_tables=table,
        block_size=block_size,
        logit_rows=positions[-1:] - tokens.start,
        feedback=np.full(len(positions), -1),
    )
