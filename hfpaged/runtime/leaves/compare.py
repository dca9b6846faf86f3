"""Compares leaves with the modules that they stand for, in a forward of the model in which both run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfpaged.program.description import NotRecognized
from hfpaged.program.trace import Trace
from hfpaged.program.verify import row_errors
from hfpaged.runtime.leaves.leaf import Leaf, own_forward
from hfpaged.runtime.leaves.linear_leaf import linear_of
from hfpaged.runtime.leaves.reference_attention import ReferenceAttention
from hfpaged.runtime.paged_attention import StepContext
from hfpaged.runtime.placing import Forward, put_in_place, take_away

# Root mean square of a row's difference, relative to that of the row.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Beyond the activations of the forward: what clamps large numbers must show.
_LOUDNESS = 30.0
_ROWS = 5
_FAR = 1 << 17


class LeafComparison:
    """Runs the forward of a trace again, once with every leaf beside its module's own forward.

    The module's result goes on, so that one wrong leaf does not spoil the input of the next.
    """

    def __init__(self, model: PreTrainedModel, step: StepContext, trace: Trace):
        self._model, self._step, self._trace = model, step, trace
        self._attention = ReferenceAttention()
        self._differing: dict[nn.Module, str] = {}
        self._compared: set[nn.Module] = set()

    def differing(self, leaves: Sequence[Leaf]) -> dict[nn.Module, str]:
        """Modules whose native results are not their own, and in what way.

        Those that the forward does not reach are given random numbers.

        Raises:
            NotRecognized: the forward fails.
        """
        self._differing, self._compared = {}, set()
        pairs = {
            module: self._both(module, leaf.forwards()[name], leaf.adds_to_input)
            for leaf in leaves
            for name, module in leaf.modules.items()
        }
        with torch.inference_mode(False), torch.no_grad(), self._step.attending_by(self._attention):
            self._forward(pairs)
            for module, both in pairs.items():
                if module not in self._compared:
                    both(_random_rows(module))
        return self._differing

    def _forward(self, forwards: dict[nn.Module, Forward]) -> None:
        tokens, positions = self._trace.token_ids[None], self._positions()[None]
        try:
            with _forwards(forwards):
                self._model(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True)
        except Exception as error:
            raise NotRecognized(f"comparing native modules failed: {type(error).__name__}: {error}") from error

    def _positions(self) -> torch.Tensor:
        """Those of the trace, but the later half the last that the model knows: some scale by the distance."""
        positions = self._trace.positions.clone()
        last = getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or _FAR
        half = len(positions) // 2
        if last >= len(positions):
            positions[-half:] = torch.arange(last - half, last)
        return positions

    def _both(self, module: nn.Module, native: Forward, adds_to_input: bool) -> Forward:
        own = own_forward(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._compared.add(module)
            expected, states = self._run(own, args, kwargs)
            got, native_states = self._run(native, args, kwargs)
            self._require_equal(module, [got, *native_states], [expected, *states])
            if adds_to_input:
                self._require_equal_additions(module, got, expected, _activations(args, kwargs))
            args, kwargs = _louder(args, kwargs)
            loud, states = self._run(own, args, kwargs)
            got, native_states = self._run(native, args, kwargs)
            # Attention over loud keys is a choice of one of them, where rounding decides between near ones.
            self._require_equal(module, native_states or [got], states or [loud])
            return expected

        return forward

    def _run(self, forward: Forward, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        """The result, and the queries, keys and values that were attended to, if any were."""
        self._attention.take()
        return forward(*args, **kwargs), self._attention.take()

    def _require_equal(self, module: nn.Module, got: Sequence[Any], expected: Sequence[Any]) -> None:
        for one, other in zip(got, expected, strict=True):
            reason = _difference(one, other)
            if reason is not None:
                self._differing[module] = f"{type(module).__name__} computes {reason}"

    def _require_equal_additions(self, module: nn.Module, got: Any, expected: Any, start: torch.Tensor) -> None:
        """As above, in what was added to `start`, less what rounding the sum costs."""
        got, expected = (value[0] if isinstance(value, tuple) else value for value in (got, expected))
        errors = row_errors(got, expected, expected.float() - start.float())
        if not bool((errors <= _TOLERANCE[expected.dtype]).all()):
            self._differing[module] = f"{type(module).__name__} adds other numbers"


@contextmanager
def _forwards(forwards: dict[nn.Module, Forward]) -> Iterator[None]:
    places = put_in_place(forwards)
    try:
        yield
    finally:
        take_away(places)


def _random_rows(module: nn.Module) -> torch.Tensor:
    weight = linear_of(module).weight
    rows = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    return rows.to(weight.dtype)


def _louder(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments with the activations multiplied."""
    quiet = _activations(args, kwargs)
    values = [value * _LOUDNESS if value is quiet else value for value in (*args, *kwargs.values())]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _activations(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """The first floating-point tensor among the arguments."""
    values = (*args, *kwargs.values())
    return next(value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())


def _difference(got: Any, expected: Any) -> str | None:
    """What distinguishes two results: tensors, or tuples of a tensor and Nones. None: rounding at most."""
    if isinstance(expected, tuple):
        if not isinstance(got, tuple) or got[1:] != expected[1:]:
            return "another kind of result"
        return _difference(got[0], expected[0])
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    got, expected, tolerance = got.float(), expected.float(), _TOLERANCE[expected.dtype]
    # Loud numbers leave the range of fp16.
    rows = expected.isfinite().all(-1)
    error, size = ((part[rows].square().mean(-1).sqrt()) for part in (got - expected, expected))
    return None if bool((error <= tolerance * size + 1e-30).all()) else "other numbers"
