"""Beams, guesses ahead, guidance and users' own code share the engine's steps with plain requests."""

from __future__ import annotations

import time

import pytest
import torch
from batches import alone, left_padded, random_prompts
from families import build_tiny
from generation.rows_alone import Unchanged

import hfpaged

PROMPTS = random_prompts((9, 4, 17), seed=6)
OPTIONS = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
LONG = 300
MODES = {
    "beams": {"num_beams": 3},
    "beam sample": {"num_beams": 2, "do_sample": True, "top_k": 4},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "guidance": {"guidance_scale": 1.4},
    "a user's processor": {"logits_processor": [Unchanged()]},
    "draft model": {"assistant_model": build_tiny("llama", seed=1)},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_step_has_the_plain_requests_token_too(pair, mode):
    """So as many steps run as the plain request has tokens, and one or two that read its prompt."""
    call = {**left_padded(PROMPTS), "max_new_tokens": 4, **OPTIONS, **MODES[mode]}
    want_plain = alone(pair.stock, PROMPTS[0], max_new_tokens=LONG, **OPTIONS)
    torch.manual_seed(0)
    want = pair.paged.generate(**call)
    engine = hfpaged.engine(pair.paged)
    calling = True
    # A step of so small a model is over before the caller's thread gets its turn: it has to have one in each.
    engine.add_listener(lambda: time.sleep(0.005) if calling else None)
    before = engine.stats()["steps"]
    plain = engine.submit(PROMPTS[0], max_new_tokens=LONG, **OPTIONS)
    torch.manual_seed(0)
    got = pair.paged.generate(**call)
    calling = False
    assert not plain.done
    assert plain.result(60) == want_plain
    assert torch.equal(got, want)
    assert LONG <= engine.stats()["steps"] - before <= LONG + 2
    engine.check()
