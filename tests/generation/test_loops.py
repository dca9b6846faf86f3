"""Transformers' own decoding loops over paged blocks: beams and assistants give stock's results, and share blocks."""

import copy

import pytest
import torch
from batches import left_padded
from engine.hooks import after_each_step, used_blocks

import hfpaged

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20, 21, 22], [30 + i for i in range(25)]]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def models(request, tiny_model):
    stock = tiny_model(request.param)
    return stock, copy.deepcopy(stock).patch()


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.7, "early_stopping": True},
        {"num_beams": 4, "do_sample": True, "temperature": 1.3},
        {"num_beams": 2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"num_beams": 3, "eos_token_id": [8, 60, 61, 62, 63, 64], "early_stopping": "never"},
    ],
    ids=str,
)
def test_beams_give_stocks_sequences_and_scores(models, options):
    outputs = []
    for model in models:
        torch.manual_seed(1)
        outputs.append(
            model.generate(
                **left_padded(PROMPTS),
                max_new_tokens=14,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        )
    expected, got = outputs
    assert torch.equal(got.sequences, expected.sequences)
    assert torch.equal(got.beam_indices, expected.beam_indices)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=0)
    engine = hfpaged.engine(models[1])
    engine.check()
    assert engine.stats()["fallbacks"] == {}
    assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]


class Keeping:
    """Keeps what it is shown, as a plot of beams would, and gives back one tensor of its own for every step."""

    def __init__(self):
        self.shown = []
        self.given = torch.empty(0)

    def __call__(self, input_ids, scores):
        self.shown.append((input_ids, scores))
        self.given.resize_(scores.shape).copy_(scores).mul_(1.1)
        return self.given


def test_a_processor_may_keep_the_scores_of_beams_and_reuse_its_own(models):
    options = {"num_beams": 3, "max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True}
    processors, outputs = (Keeping(), Keeping()), []
    for model, processor in zip(models, processors, strict=True):
        outputs.append(model.generate(**left_padded(PROMPTS), logits_processor=[processor], pad_token_id=0, **options))
    expected, got = outputs
    torch.testing.assert_close(got.scores, expected.scores, atol=1e-4, rtol=0)
    shown = [[shown[part] for shown in one.shown] for part in (0, 1) for one in processors]
    assert all(torch.equal(a, b) for a, b in zip(shown[0], shown[1], strict=True))
    torch.testing.assert_close(shown[3], shown[2], atol=1e-4, rtol=0)


def test_beams_of_one_prompt_share_its_blocks(models):
    _, patched = models
    engine = hfpaged.engine(patched)
    ids = torch.tensor([list(range(3, 99))])
    with after_each_step(engine, lambda: used_blocks(engine)) as held:
        patched.generate(ids, attention_mask=torch.ones_like(ids), num_beams=4, max_new_tokens=8, pad_token_id=0)
    # Six full blocks of prompt, once; each beam has at most one block of its own.
    assert 6 < max(held) <= 6 + 4


@pytest.mark.parametrize("seed", [0, 1], ids=["same weights", "other weights"])
def test_an_assistant_changes_nothing_and_runs_on_the_engine(models, tiny_model, seed):
    stock, patched = models
    assistant = tiny_model(stock.config.model_type, seed=seed)
    ids = torch.tensor([PROMPTS[2]])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
    expected = stock.generate(ids, assistant_model=assistant, **options)
    assert torch.equal(patched.generate(ids, assistant_model=assistant, **options), expected)
    hfpaged.engine(patched).check()
    assert hfpaged.engine(patched).stats()["fallbacks"] == {}


def test_an_error_in_a_loop_frees_its_blocks(models):
    _, patched = models

    class Broken:
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 12:
                raise KeyError("mine")
            return scores

    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(KeyError, match="mine"):
        patched.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=3,
            max_new_tokens=9,
            logits_processor=[Broken()],
            pad_token_id=0,
        )
    engine = hfpaged.engine(patched)
    engine.check()
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_a_seed_is_refused_where_it_would_do_nothing(models):
    _, patched = models
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(hfpaged.errors.UnsupportedOptionError, match="seed"):
        patched.generate(ids, num_beams=2, do_sample=True, max_new_tokens=3, hfpaged={"seed": 3})


def test_beams_with_low_memory_are_refused_as_in_stock(models):
    for model in models:
        with pytest.raises(ValueError, match="low_memory"):
            model.generate(torch.tensor([PROMPTS[0]]), num_beams=2, low_memory=True, max_new_tokens=3, pad_token_id=0)
