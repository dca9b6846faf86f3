"""The LM Evaluation Harness around a patched model: stock's log-likelihoods and texts, at every batch size."""

from __future__ import annotations

import copy
import itertools

import pytest
from batches import random_prompts
from families import build_tiny
from tiny_chat import chat_tokenizer

import hfpaged

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENIZER = chat_tokenizer()
TEXTS = [TOKENIZER.decode(prompt) for prompt in random_prompts((9, 30, 17, 4, 23), seed=3)]
UNTIL = {"max_gen_toks": 12, "do_sample": False}


def results(model, batch_size, stop):
    """What the harness makes of each kind of request."""
    from hfpaged.integrations.lm_eval import harness, requests

    lm = harness(model, TOKENIZER, batch_size)
    pairs = list(itertools.pairwise(TEXTS))
    options = [(text, {**UNTIL, "until": stop}) for text in TEXTS]
    return (
        lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True),
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS]), disable_tqdm=True),
        lm.generate_until(requests("generate_until", options), disable_tqdm=True),
    )


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_results_are_stocks(batch_size):
    pytest.importorskip("lm_eval")
    stock = build_tiny("llama")
    plain = results(stock, 1, ["\n"])[2]
    stop = [plain[1][3:5], plain[2][5], "\n"]
    paged = copy.deepcopy(stock).patch()
    want = results(stock, batch_size, stop)
    got = results(paged, batch_size, stop)
    for ours, stocks in zip(got[0], want[0], strict=True):
        assert ours == pytest.approx(stocks, abs=1e-4)
    assert got[1] == pytest.approx(want[1], abs=1e-4)
    assert got[2] == want[2]
    # The stop texts did end some, and all of it ran on the engine but for the plain forwards that score.
    assert any(text != longer for text, longer in zip(want[2], plain, strict=True))
    engine = hfpaged.engine(paged)
    engine.check()
    assert engine.stats()["generated_tokens"] > 0
    assert engine.stats()["fallbacks"] == {}
