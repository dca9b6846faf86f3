"""A prompt, short and long greedy options for it, and helpers for those who watch its request."""

from __future__ import annotations

from batches import random_prompts

PROMPT = random_prompts((20,))[0]
GREEDY = {"do_sample": False, "eos_token_id": -1}
LONG = {**GREEDY, "max_new_tokens": 450}


def started(handle):
    """The handle, once its request runs."""
    next(iter(handle))
    return handle


class Sink:
    """A streamer that throws everything away."""

    def put(self, value):
        pass

    def end(self):
        pass
