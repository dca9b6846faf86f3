"""Readers of text iterators, who wait on another thread or event loop for what a call generates."""

from __future__ import annotations

from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer


def release_reader(streamer: BaseStreamer | None) -> None:
    """End the iterator of a call that failed. In stock its reader waits on, until a timeout if it has one.

    Other streamers are left alone: what they do at the end may be meant for whole texts only.
    """
    if isinstance(streamer, TextIteratorStreamer | AsyncTextIteratorStreamer):
        streamer.end()
