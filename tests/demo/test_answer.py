"""Answers: stock's text, at a bearable pace, stopped when asked to, with tools in between."""

from __future__ import annotations

import asyncio
import time

import pytest
from engine.hooks import WAIT_SECONDS, at_rest, runs, used_blocks

from hfpaged.demo.answer import Answer, Sampling, seconds_between_updates
from hfpaged.demo.transcript import ANSWER, TOOL_CALL, TOOL_RESULT
from hfpaged.runtime.handle import GenerationHandle

GREEDY = Sampling(max_new_tokens=40)


def ask(question):
    return [{"role": "user", "content": question}]


def collect(host, answer, session="a", look=lambda progress: None):
    """All that the answer yields; `look` is called with each."""

    async def run():
        seen = []
        with host.visitors.serving(session) as scope:
            async for progress in answer.stream(scope):
                seen.append(progress)
                look(progress)
        return seen

    return asyncio.run(run())


def slow(run, *args):
    time.sleep(0.01)
    return run(*args)


def test_the_text_is_what_stock_gives(host, stock_answer):
    last = collect(host, Answer(host, ask("Why?"), GREEDY))[-1]
    text = "".join(step.text for step in last.steps if step.kind == ANSWER)
    assert text.strip() == stock_answer("Why?", 40).strip() != ""
    assert last.finish_reason in ("stop", "length")
    assert last.written[-1]["content"].strip() == text.strip()
    assert 0 < last.first_token_seconds <= last.seconds
    assert last.new_tokens > 1 and last.tokens_per_second > 0


def test_many_at_once_share_the_steps_and_get_their_own_text(host, stock_answer):
    questions = [f"Question {number}?" for number in range(6)]
    before = host.engine.stats()["steps"]

    async def run_one(question):
        with host.visitors.serving(question) as scope:
            return [progress async for progress in Answer(host, ask(question), GREEDY).stream(scope)][-1]

    async def run():
        return await asyncio.gather(*(run_one(question) for question in questions))

    finals = asyncio.run(run())
    steps = host.engine.stats()["steps"] - before
    for question, final in zip(questions, finals, strict=True):
        assert final.written[-1]["content"].strip() == stock_answer(question, 40).strip()
    assert steps < sum(final.new_tokens for final in finals) / 2


def test_updates_are_coalesced(host):
    with runs(host.engine, slow):
        began = time.perf_counter()
        seen = collect(host, Answer(host, ask("Go on"), Sampling(max_new_tokens=80)))
    seconds = time.perf_counter() - began
    assert seen[-1].new_tokens > 30
    assert 3 <= len(seen) <= 20 * seconds + 3
    assert seconds_between_updates(1) == 1 / 20
    assert seconds_between_updates(32) == pytest.approx(0.4)


def test_a_stopped_answer_keeps_its_text_and_frees_its_blocks(host):
    answer = Answer(host, ask("Go on"), Sampling(max_new_tokens=400))
    with runs(host.engine, slow):
        last = collect(host, answer, "me", lambda progress: progress.new_tokens > 3 and host.visitors.stop("me"))[-1]
        assert last.finish_reason == "cancelled"
        assert 1 < last.new_tokens < 400
        assert at_rest(host.engine)
    assert last.steps and host.visitors.num_served == 0


def test_stopping_one_visitor_leaves_the_others_alone(host):
    seen = collect(host, Answer(host, ask("Go on"), GREEDY), "me", lambda progress: host.visitors.stop("somebody else"))
    assert seen[-1].finish_reason != "cancelled"


def test_a_closed_generator_frees_its_blocks(host):
    async def run():
        with host.visitors.serving("me") as scope:
            stream = Answer(host, ask("Go on"), Sampling(max_new_tokens=400)).stream(scope)
            await anext(stream)
            assert used_blocks(host.engine) > 0
            await stream.aclose()

    with runs(host.engine, slow):
        asyncio.run(asyncio.wait_for(run(), WAIT_SECONDS))
        assert at_rest(host.engine)


def test_a_sampled_answer_follows_its_seed(host):
    sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=7)
    texts = {collect(host, Answer(host, ask("Why?"), sampling))[-1].written[-1]["content"] for _ in range(2)}
    assert len(texts) == 1
    other = collect(host, Answer(host, ask("Why?"), sampling._replace(seed=8)))[-1].written[-1]["content"]
    assert other not in texts


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"max_new_tokens": 1_000_000},
        {"top_p": -1.0, "temperature": 1.0},
    ],
)
def test_a_value_that_cannot_work_is_refused_before_anything_is_queued(host, values):
    before = host.engine.stats()["prompt_tokens"]
    with pytest.raises(ValueError):
        collect(host, Answer(host, ask("Why?"), Sampling(**values)))
    assert host.engine.stats()["prompt_tokens"] == before
    assert host.visitors.num_served == 0


def test_the_oldest_turns_make_room(host):
    turns = [{"role": role, "content": "x" * 60} for _ in range(6) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "Be brief."}, *turns, *ask("And now?")]
    prompt = host.chat_prompt(messages, new_tokens=200)
    text = host.tokenizer.decode(prompt.ids)
    assert len(prompt.ids) + 200 <= host.max_tokens
    assert prompt.left_out > 0 and prompt.left_out % 2 == 0
    assert text.startswith("s:Be brief.\nu:x") and text.endswith("u:And now?\na:")


# ---- tools ----


class ScriptedEngine:
    """Answers with texts that were written beforehand; remembers the prompts."""

    def __init__(self, tokenizer, texts):
        self.prompts = []
        self._tokenizer = tokenizer
        self._texts = iter(texts)

    def submit(self, prompt_ids, **options):
        self.prompts.append(self._tokenizer.decode(prompt_ids))
        handle = GenerationHandle(0, len(prompt_ids), lambda handle: None)
        for token in self._tokenizer(next(self._texts))["input_ids"]:
            handle.push([token])
        handle.finish("stop")
        return handle


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def scripted(host, monkeypatch, texts):
    engine = ScriptedEngine(host.tokenizer, texts)
    monkeypatch.setattr(host, "engine", engine)
    return engine


def test_a_tool_call_is_run_and_its_result_goes_back_to_the_model(shared_host, monkeypatch):
    engine = scripted(shared_host, monkeypatch, [f"Let me see. {CALL}", "It is 42."])
    last = collect(shared_host, Answer(shared_host, ask("6*7?"), GREEDY, use_tools=True))[-1]
    assert [step.kind for step in last.steps] == [ANSWER, TOOL_CALL, TOOL_RESULT, ANSWER]
    assert last.steps[2].text == "42"
    assert [message["role"] for message in last.written] == ["assistant", "tool", "assistant"]
    assert engine.prompts[1].startswith("tools\n") and engine.prompts[1].endswith("t:42\na:")


def test_tool_rounds_are_bounded(shared_host, monkeypatch):
    engine = scripted(shared_host, monkeypatch, [CALL] * 50)
    collect(shared_host, Answer(shared_host, ask("?"), GREEDY, use_tools=True))
    assert len(engine.prompts) == 4


def test_without_tools_a_call_is_shown_and_not_run(shared_host, monkeypatch):
    engine = scripted(shared_host, monkeypatch, [CALL])
    last = collect(shared_host, Answer(shared_host, ask("?"), GREEDY))[-1]
    assert [step.kind for step in last.steps] == [TOOL_CALL]
    assert len(engine.prompts) == 1 and not engine.prompts[0].startswith("tools")


def test_a_tool_round_without_room_for_another_ends_with_what_there_is(shared_host, monkeypatch):
    scripted(shared_host, monkeypatch, [f"Let me see. {CALL}"])
    sampling = GREEDY._replace(max_new_tokens=shared_host.max_tokens - 40)
    last = collect(shared_host, Answer(shared_host, ask("6*7?"), sampling, use_tools=True))[-1]
    assert [step.kind for step in last.steps] == [ANSWER, TOOL_CALL, TOOL_RESULT]
    assert last.finish_reason == "length" and last.left_out == 0
