"""Readers of text iterators, who wait on another thread or event loop for what a call generates."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from hfpaged.errors import RequestCancelled


class _Failure:
    """An item of a text queue that raises in the reader, who compares each item with the stop signal."""

    def __init__(self, error: Exception):
        self._error = error

    def __eq__(self, other: object) -> bool:
        raise self._error

    __hash__ = None


@contextlib.contextmanager
def reader_released(generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Around a call of `generate` with these arguments: whoever reads from its streamer learns that it failed."""
    try:
        yield
    except BaseException as error:
        # Any of the arguments may be what is wrong with the call.
        names = inspect.signature(generate).parameters
        release_reader({**dict(zip(names, args, strict=False)), **kwargs}.get("streamer"), error)
        raise


def release_reader(streamer: BaseStreamer | None, error: BaseException) -> None:
    """End the iterator of a call that failed: with the error, or just so if the call was cancelled.

    In stock its reader waits on, until a timeout if it has one. Other streamers are left alone: what they do at the end
    may be meant for whole texts only. So are iterators that take their items in a way of their own: they end.
    """
    if not isinstance(streamer, TextIteratorStreamer | AsyncTextIteratorStreamer):
        return
    # An event loop that is closed has no reader any more, and the streamer's tokenizer may be what has failed.
    with contextlib.suppress(Exception):
        if isinstance(error, Exception) and not isinstance(error, RequestCancelled):
            _put_failure(streamer, _Failure(error))
        streamer.end()


def _put_failure(streamer: TextIteratorStreamer | AsyncTextIteratorStreamer, failure: _Failure) -> None:
    if isinstance(streamer, TextIteratorStreamer):
        if type(streamer).__next__ is TextIteratorStreamer.__next__:
            streamer.text_queue.put(failure, timeout=streamer.timeout)
    elif type(streamer).__anext__ is AsyncTextIteratorStreamer.__anext__:
        streamer.loop.call_soon_threadsafe(streamer.text_queue.put_nowait, failure)
