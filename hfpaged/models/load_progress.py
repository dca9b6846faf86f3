"""How far Transformers has come in loading a checkpoint's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from transformers.utils import logging


@contextlib.contextmanager
def weights_progress(report: Callable[[float], None]) -> Iterator[None]:
    """Have `report` called with a growing fraction from 0 to 1 while weights load in the block.

    Transformers has one hook for its progress bars in a process, so this is for processes that load one model.
    """

    def watched(make_bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        total = kwargs.get("total") or (len(args[0]) if args and hasattr(args[0], "__len__") else 0)
        return _WatchedBar(make_bar(*args, **kwargs), total, report)

    previous = logging.set_tqdm_hook(watched)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


class _WatchedBar:
    """A progress bar that also reports whole tenths. Everything else is the bar's."""

    def __init__(self, bar: Any, total: int, report: Callable[[float], None]):
        self._bar = bar
        self._total = total
        self._report = report
        self._done = 0

    def update(self, count: int = 1) -> Any:
        self._count(count)
        return self._bar.update(count)

    def __iter__(self) -> Iterator[Any]:
        for item in self._bar:
            yield item
            self._count(1)

    def __enter__(self) -> _WatchedBar:
        self._bar.__enter__()
        return self

    def __exit__(self, *arguments: Any) -> Any:
        return self._bar.__exit__(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)

    def _count(self, count: int) -> None:
        before, self._done = self._done, self._done + count
        if self._total and before * 10 // self._total < self._done * 10 // self._total:
            self._report(self._done / self._total)
