"""User code in a call: it gets exactly stock's calls, on its own thread, and nobody else notices what it does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch
from batches import alone, left_padded, random_prompts
from generation.fakes import (
    WAIT_SECONDS,
    AllowedTokens,
    BlockingCriteria,
    DoneTracker,
    GlobalStreamer,
    InnerModel,
    Iteratorized,
    ObservingCriteria,
    ObservingProcessor,
    PrefixGrammar,
    RaisingCriteria,
    RowGrammar,
    StopOneRow,
    inner_generate,
    plain_forward,
)
from generation.noise import noise

import hfpaged

PROMPTS = random_prompts((3, 16, 9))
WIDTH = 16
NEW = 14
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
SAMPLED_GREEDILY = {**GREEDY, "do_sample": True, "top_k": 1, "temperature": 0.7}


@pytest.fixture(scope="module")
def ender(pair):
    """An end token that some rows meet early and others never."""
    texts = [alone(pair.stock, prompt, eos_token_id=-1, **GREEDY) for prompt in PROMPTS]
    token = texts[1][4]
    assert token not in texts[0]
    return token


def in_time(function):
    """What `function` returns, on another thread; a deadlock is a failure instead of a hang."""
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(function()), daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert outcome, "it failed, or hangs"
    return outcome[0]


def assert_nothing_is_held(model):
    """Blocks of an ended call are free within a step: `check` runs between two of them."""
    engine = hfpaged.engine(model)
    engine.check()
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["blocks_free"] == stats["blocks_total"]


def processors(*made):
    return {"logits_processor": list(made)}


def criteria(*made):
    return {"stopping_criteria": list(made)}


def let_go_after_a_while(fake):
    threading.Timer(0.05, fake.go_on.set).start()
    return fake


# Name -> a function of (model, end token) that makes fresh user objects, and the options that pass them.
FAKES = {
    "ObservingProcessor": lambda model, eos: (fake := ObservingProcessor(), processors(fake)),
    "ObservingCriteria": lambda model, eos: (fake := ObservingCriteria(), criteria(fake)),
    "ObservingCriteria with scores": lambda model, eos: (
        fake := ObservingCriteria(),
        {**criteria(fake), "return_dict_in_generate": True, "output_scores": True},
    ),
    "RowGrammar": lambda model, eos: (fake := RowGrammar([3, 7, 5], [4, 9, 6], eos), processors(fake)),
    "PrefixGrammar": lambda model, eos: (fake := PrefixGrammar(), processors(fake)),
    "PrefixGrammar and other options": lambda model, eos: (
        fake := PrefixGrammar(),
        {**processors(fake), "no_repeat_ngram_size": 2, "min_new_tokens": 6, "suppress_tokens": [30, 75]},
    ),
    "DoneTracker": lambda model, eos: (fake := DoneTracker(3, WIDTH, {48, 75, 32, 117}), criteria(fake)),
    "StopOneRow": lambda model, eos: (fake := StopOneRow([2, 11, 5]), criteria(fake)),
    "RaisingCriteria": lambda model, eos: (fake := RaisingCriteria(ValueError("stop"), step=6), criteria(fake)),
    "BlockingCriteria": lambda model, eos: (fake := let_go_after_a_while(BlockingCriteria(step=3)), criteria(fake)),
    "GlobalStreamer": lambda model, eos: (fake := GlobalStreamer(), {"streamer": fake}),
    "model forward inside": lambda model, eos: (fake := InnerModel(model, plain_forward), processors(fake)),
    "generate inside": lambda model, eos: (fake := InnerModel(model, inner_generate), processors(fake)),
    "prefix_allowed_tokens_fn": lambda model, eos: (fake := AllowedTokens(), {"prefix_allowed_tokens_fn": fake}),
}


def run(model, name, eos, options):
    """The user object, and the text or the error of a call with it."""
    fake, passed = FAKES[name](model, eos)
    try:
        out = model.generate(**left_padded(PROMPTS), eos_token_id=eos, **options, **passed)
    except ValueError as error:
        return fake, repr(error)
    return fake, getattr(out, "sequences", out).tolist()


def assert_same_calls(got, want, ender=None):
    assert got.trace == want.trace
    for ours, stocks, (ids, *_) in zip(
        getattr(got, "scores", ()), getattr(want, "scores", ()), want.trace, strict=False
    ):
        # Of a row that has ended stock shows what would follow the end and padding, which nobody can use.
        running = torch.tensor([row[-1] not in (0, ender) for row in ids])
        torch.testing.assert_close(ours[running], stocks[running], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED_GREEDILY], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", FAKES)
def test_user_code_gets_stocks_calls(pair, ender, name, options):
    want, expected = run(pair.stock, name, ender, options)
    got, outcome = in_time(lambda: run(pair.paged, name, ender, options))
    assert outcome == expected
    assert_same_calls(got, want, ender)
    assert len(want.trace) > 3
    assert_nothing_is_held(pair.paged)


@pytest.mark.parametrize("name", FAKES)
def test_user_code_gets_stocks_calls_among_noise(pair, ender, name):
    want, expected = run(pair.stock, name, ender, GREEDY)
    with noise(pair.paged):
        for _ in range(2):
            got, outcome = in_time(lambda: run(pair.paged, name, ender, GREEDY))
            assert outcome == expected
            assert_same_calls(got, want, ender)
    assert_nothing_is_held(pair.paged)


@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_user_code_gets_stocks_calls_under_preemption(pair, ender, kind):
    model, preemptions = pair.stock, 0
    for name in FAKES:
        want, expected = run(model, name, ender, GREEDY)
        with hfpaged.patched(model, num_blocks=4, preemption=kind, max_batch_tokens=9):
            got, outcome = in_time(lambda name=name: run(model, name, ender, GREEDY))
            preemptions += hfpaged.engine(model).stats()[f"preemptions_{kind}"]
            assert_nothing_is_held(model)
        assert outcome == expected
        assert_same_calls(got, want, ender)
    assert preemptions > len(FAKES)


def test_user_code_runs_on_the_thread_that_called(pair, ender):
    fake = ObservingProcessor()
    with noise(pair.paged, 2):
        pair.paged.generate(**left_padded(PROMPTS), **GREEDY, **processors(fake))
    assert fake.threads == {threading.get_ident()}


def test_without_an_end_token_rows_go_on_until_all_are_done(pair):
    """Stock pads ended rows only if there is an end token; a criterion alone does not end a row by itself."""
    for model in pair:
        model.generation_config.eos_token_id = None
    try:
        want, got = StopOneRow([2, 11, 5]), StopOneRow([2, 11, 5])
        expected = pair.stock.generate(**left_padded(PROMPTS), **GREEDY, **criteria(want))
        assert pair.paged.generate(**left_padded(PROMPTS), **GREEDY, **criteria(got)).tolist() == expected.tolist()
        assert_same_calls(got, want)
        assert expected.shape[1] == WIDTH + 11
    finally:
        for model in pair:
            model.generation_config.eos_token_id = 2


@pytest.mark.parametrize("rows", [1, 2])
def test_classifier_free_guidance(pair, rows):
    call = {**left_padded([PROMPTS[1], PROMPTS[1][::-1]][:rows]), **GREEDY, "guidance_scale": 1.5}
    want = pair.stock.generate(**call)
    assert in_time(lambda: pair.paged.generate(**call)).tolist() == want.tolist()
    with noise(pair.paged):
        assert in_time(lambda: pair.paged.generate(**call)).tolist() == want.tolist()
    assert want.tolist() != pair.stock.generate(**{**call, "guidance_scale": None}).tolist()


@pytest.mark.parametrize("negative", [None, [[7, 8, 9], [30, 31, 32]], [[0, 8, 9], [30, 31, 32]]], ids=str)
def test_guidance_runs_its_second_forward_on_the_engine(pair, monkeypatch, negative):
    """One with padded negative prompts does not: stock counts the padding among their positions."""
    call = {**left_padded([PROMPTS[1], PROMPTS[1][::-1]]), **GREEDY, "guidance_scale": 2.5}
    if negative is not None:
        mask = [[int(token != 0) for token in row] for row in negative]
        call |= {"negative_prompt_ids": torch.tensor(negative), "negative_prompt_attention_mask": torch.tensor(mask)}
    want = pair.stock.generate(**call)
    asked, forward = [], type(pair.paged).forward
    monkeypatch.setattr(
        type(pair.paged), "forward", lambda *args, **kwargs: asked.append(1) or forward(*args, **kwargs)
    )
    assert pair.paged.generate(**call).tolist() == want.tolist()
    is_padded = negative is not None and negative[0][0] == 0
    assert bool(asked) == is_padded
    engine = hfpaged.engine(pair.paged)
    engine.check()
    assert engine.stats()["running"] == 0


def test_empty_list_of_allowed_tokens_raises_stocks_error_to_that_caller_only(pair):
    errors = []
    with noise(pair.paged):
        for model in pair:
            with pytest.raises(ValueError) as caught:
                model.generate(**left_padded(PROMPTS), **GREEDY, prefix_allowed_tokens_fn=AllowedTokens(forbid_at=8))
            errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert_nothing_is_held(pair.paged)


def test_users_length_criterion_takes_the_place_of_the_configs(pair):
    from transformers import MaxLengthCriteria, StoppingCriteriaList

    call = {**left_padded(PROMPTS), "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    for length in (WIDTH - 2, WIDTH + 3, WIDTH + 40):
        users = StoppingCriteriaList([MaxLengthCriteria(length)])
        with pytest.warns(UserWarning):
            want = pair.stock.generate(**call, stopping_criteria=users)
            assert pair.paged.generate(**call, stopping_criteria=users).tolist() == want.tolist()
        assert want.shape[1] == max(WIDTH + 1, length)


# ---- user code that raises or blocks ----


class Interrupt(KeyboardInterrupt):
    """What a notebook raises."""


@pytest.mark.parametrize("error", [ValueError("stop"), Interrupt("stop"), GeneratorExit(), StopIteration("over")])
def test_an_exception_reaches_its_caller_and_frees_its_blocks(pair, error):
    with pytest.raises(type(error)) as caught:
        pair.paged.generate(**left_padded(PROMPTS), **GREEDY, **criteria(RaisingCriteria(error, step=3)))
    assert caught.value is error
    assert_nothing_is_held(pair.paged)


def test_an_exception_frees_only_its_own_callers_blocks(pair):
    error = ValueError("stop")
    engine = hfpaged.engine(pair.paged)
    other = BlockingCriteria(step=2)
    outcome = []
    call = {**left_padded(PROMPTS), **GREEDY, "eos_token_id": -1, **criteria(other)}
    thread = threading.Thread(target=lambda: outcome.append(pair.paged.generate(**call)))
    thread.start()
    assert other.blocked.wait(WAIT_SECONDS)
    held = engine.stats()["blocks_total"] - engine.stats()["blocks_free"]
    with pytest.raises(ValueError):
        pair.paged.generate(**left_padded(PROMPTS), **GREEDY, **criteria(RaisingCriteria(error, step=2)))
    engine.check()
    assert engine.stats()["blocks_total"] - engine.stats()["blocks_free"] == held > 0
    other.go_on.set()
    thread.join(WAIT_SECONDS)
    assert outcome[0].tolist() == pair.stock.generate(**{**call, "stopping_criteria": None}).tolist()


def test_a_processor_or_streamer_that_raises(pair):
    class Broken(GlobalStreamer):
        def put(self, value):
            super().put(value)
            if len(self.trace) == 4:
                raise OSError("the connection is gone")

    for rows in (PROMPTS, PROMPTS[:1]):
        with pytest.raises(OSError, match="connection"):
            pair.paged.generate(**left_padded(rows), **GREEDY, streamer=Broken())
        assert_nothing_is_held(pair.paged)
        with pytest.raises(RuntimeError, match="2 matchers"):
            pair.paged.generate(**left_padded(rows), **GREEDY, **processors(RowGrammar([3, 3], [2, 2], eos=2)))
        assert_nothing_is_held(pair.paged)


@pytest.fixture
def interruptible():
    """A process that was started in the background may ignore the keyboard."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_from_the_keyboard_while_waiting(pair, interruptible):
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            pair.paged.generate(**left_padded(PROMPTS), do_sample=False, max_new_tokens=400, eos_token_id=-1)
    assert_nothing_is_held(pair.paged)
    assert alone(pair.paged, PROMPTS[0], **GREEDY) == alone(pair.stock, PROMPTS[0], **GREEDY)


def test_a_blocked_criterion_delays_nobody(pair):
    """It sleeps for as long as the others need for all their work, which they do at full pace."""
    sleeper = BlockingCriteria(step=3)
    call = {**left_padded(PROMPTS), **GREEDY, "eos_token_id": -1}
    want = pair.stock.generate(**call)
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(pair.paged.generate(**call, **criteria(sleeper))))
    thread.start()
    assert sleeper.blocked.wait(WAIT_SECONDS)
    engine = hfpaged.engine(pair.paged)
    before = engine.stats()["steps"]
    for _ in range(5):
        assert in_time(lambda: pair.paged.generate(**call)).tolist() == want.tolist()
    # One step for all prompts, then one a token: not one more than without the sleeper.
    assert engine.stats()["steps"] - before == 5 * NEW
    with noise(pair.paged):
        assert in_time(lambda: pair.paged.generate(**call)).tolist() == want.tolist()
    assert not outcome
    sleeper.go_on.set()
    thread.join(WAIT_SECONDS)
    assert outcome[0].tolist() == want.tolist()
    assert_nothing_is_held(pair.paged)


def test_reader_of_a_bounded_queue_may_be_slow_and_leave(pair):
    callback = Iteratorized()
    errors = []

    def generate():
        try:
            pair.paged.generate(**left_padded(PROMPTS[:1]), do_sample=False, max_new_tokens=300, eos_token_id=-1,
                                **criteria(callback))  # fmt: skip
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    want = alone(pair.stock, PROMPTS[0], **{**GREEDY, "eos_token_id": -1})
    for step in range(4):
        with noise(pair.paged, 1):
            assert callback.queue.get(timeout=WAIT_SECONDS) == PROMPTS[0] + want[: step + 1]
    callback.closed.set()
    with contextlib.suppress(Exception):
        callback.queue.get(timeout=1)
    thread.join(WAIT_SECONDS)
    assert errors == ["the reader went away"]
    assert_nothing_is_held(pair.paged)


def test_stop_event_is_honoured_within_a_token(pair):
    stop = threading.Event()
    observer = ObservingCriteria()

    def stopping(input_ids, scores, **kwargs):
        if input_ids.shape[1] == WIDTH + 5:
            stop.set()
        return stop.is_set()

    out = pair.paged.generate(**left_padded(PROMPTS), **GREEDY, **criteria(observer, stopping))
    assert out.shape[1] == WIDTH + 5
    assert len(observer.trace) == 5


def test_global_streamer_gives_each_of_several_users_in_turn_what_stock_gives(pair):
    streamers = []
    for model in pair:
        streamer = GlobalStreamer()
        for prompt in PROMPTS:
            model.generate(**left_padded([prompt]), streamer=streamer, **GREEDY)
        streamers.append(streamer.trace)
    assert streamers[0] == streamers[1]
