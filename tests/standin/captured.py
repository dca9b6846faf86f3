"""Requests that run in the same captured steps, and what tests look at of those."""

from __future__ import annotations

from batches import alone
from engine.hooks import WAIT_SECONDS, paused
from families import build_tiny
from internals import workspace_of

GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
NEW = 10


def captured(engine):
    return workspace_of(engine).tier.captured


def together(engine, prompts, new=NEW, **options):
    """All prompts at once, in the same steps."""
    return mixture(engine, [options] * len(prompts), prompts, new)


def mixture(engine, options, prompts, new=NEW):
    """A row for each of the options, in the same steps."""
    engine.submit([5], max_new_tokens=1, **GREEDY).result(WAIT_SECONDS)
    with paused(engine):
        handles = [
            engine.submit(prompt, max_new_tokens=new, **{**GREEDY, **one})
            for prompt, one in zip(prompts, options, strict=True)
        ]
    return [handle.result(WAIT_SECONDS) for handle in handles]


def stock(family, prompts, new=NEW):
    model = build_tiny(family)
    return [alone(model, prompt, max_new_tokens=new, **GREEDY) for prompt in prompts]
