"""PieceRecorder: records a forward so that it can be started again, around the modules that cannot be recorded.

A module that looks at its numbers on the host (experts that count their tokens, say) cannot be in a recording. Where
one makes a recording fail, all modules of its class run as they are from then on, and what is before, between and
behind them is recorded in pieces.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hfpaged.runtime.device.accelerator import Accelerator, Recording
from hfpaged.runtime.device.called_by import called_by

logger = logging.getLogger(__name__)

# Classes of modules that may run between the pieces; with more, the pieces are too small to be worth it.
_MOST_CLASSES = 3


class CapturedWork:
    """Work that can be started again: recorded pieces, and calls in between.

    Attributes:
        outputs: what the recorded function returned; a replay writes the same memory.
    """

    def __init__(self, applied: Callable[[], AbstractContextManager[None]]):
        self.outputs: Any = None
        self._applied = applied
        self._work: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Append a piece or a call."""
        self._work.append(work)

    def replay(self) -> None:
        """Start all of it, in order."""
        with self._applied():
            for work in self._work:
                work()


class PieceRecorder:
    """Records forwards of one model.

    Args:
        model: whose modules the forward calls.
        keeps_together: ids of modules that must not run between pieces as a part of another one (attention layers).
        applied: the state of the thread that forwards run under.

    Attributes:
        breaks: how many modules run uncaptured between the pieces, by class.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        keeps_together: Iterable[int],
        applied: Callable[[], AbstractContextManager[None]],
    ):
        self.breaks: Counter[str] = Counter()
        self._accelerator = accelerator
        self._model = model
        self._keeps_together = frozenset(keeps_together)
        self._applied = applied
        self._broken: list[nn.Module] = []

    def run(self, function: Callable[[], Any]) -> CapturedWork:
        """Record and run a function.

        Raises:
            Exception: it did something that cannot be recorded, and no module can be left out to mend that.
        """
        while True:
            running: list[nn.Module] = []
            try:
                with _noting_calls(self._model, running):
                    return self._record(function)
            except Exception as error:
                if not running or not self._leave_out(running[-1]):
                    raise
                name = type(running[-1]).__name__
                logger.info("hfpaged: %s cannot be captured (%s); it runs between captured pieces", name, error)

    def _leave_out(self, module: nn.Module) -> bool:
        """Have modules of this class run between the pieces. Returns whether that is possible and new."""
        if len(self.breaks) == _MOST_CLASSES or module in self._broken:
            return False
        if any(id(part) in self._keeps_together for part in module.modules() if part is not module):
            return False
        same = [one for one in self._model.modules() if type(one) is type(module)]
        self._broken += same
        self.breaks[type(module).__name__] += len(same)
        return True

    def _record(self, function: Callable[[], Any]) -> CapturedWork:
        captured = CapturedWork(self._applied)
        with contextlib.ExitStack() as stack:
            piece = _Piece(self._accelerator, captured)
            stack.push(piece.abandon_on_error)
            for module in self._broken:
                stack.enter_context(called_by(module, piece.call_uncaptured))
            piece.begin()
            captured.outputs = function()
            piece.end()
        return captured


class _Piece:
    """What is being recorded now."""

    def __init__(self, accelerator: Accelerator, captured: CapturedWork):
        self._accelerator = accelerator
        self._captured = captured
        self._recording: Recording | None = None

    def begin(self) -> None:
        self._recording = self._accelerator.record()

    def end(self) -> None:
        """End the piece and run it: what was recorded has not been computed yet, and a call may want to see it."""
        recording, self._recording = self._recording, None
        start = recording.end()
        self._captured.add(start)
        start()

    def abandon_on_error(self, *error: Any) -> None:
        if self._recording is not None:
            recording, self._recording = self._recording, None
            with contextlib.suppress(Exception):  # the error that led here says more
                recording.end()

    def call_uncaptured(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module between two pieces. What it returns is copied to where the next piece will read it."""
        self.end()
        kept = tree_map_only(torch.Tensor, torch.clone, forward(*args, **kwargs))
        self._captured.add(lambda: _copy_into(kept, forward(*args, **kwargs)))
        self.begin()
        return kept


@contextlib.contextmanager
def _noting_calls(model: nn.Module, running: list[nn.Module]) -> Iterator[None]:
    """Keep the modules whose forward has begun and not ended in `running`, the innermost last."""

    def begins(module: nn.Module, _: Any) -> None:
        running.append(module)

    def ends(*_: Any) -> None:
        running.pop()

    hooks = []
    for module in model.modules():
        hooks += [module.register_forward_pre_hook(begins), module.register_forward_hook(ends)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _copy_into(kept: Any, new: Any) -> None:
    if isinstance(kept, torch.Tensor):
        kept.copy_(new)
    elif isinstance(kept, (tuple, list)):
        for one, other in zip(kept, new, strict=True):
            _copy_into(one, other)
