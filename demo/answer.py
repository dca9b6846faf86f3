"""Answering: a conversation goes to the engine, and comes back as steps with numbers, at a pace a browser can take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import hfpaged
from hfpaged.demo import calculator
from hfpaged.demo.host import ChatPrompt, Host, Message
from hfpaged.demo.transcript import TOOL_CALL, TOOL_RESULT, Step, parse
from hfpaged.errors import InputError, RequestCancelled
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.text.detokenizer import Detokenizer

# A browser gains nothing from more than twenty updates of a text a second, and a server has to share out its time.
MOST_UPDATES_PER_SECOND = 20
MOST_UPDATES_PER_SECOND_FOR_ALL = 80
MOST_TOOL_ROUNDS = 4


class Sampling(NamedTuple):
    """What a visitor may set. A temperature of 0 is greedy; a seed of -1 is another one each time."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = -1

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate` and `submit`."""
        # What is not 0 is for the engine to judge: a page's values may come from anywhere.
        options: dict[str, Any] = {"max_new_tokens": int(self.max_new_tokens), "do_sample": self.temperature != 0}
        if self.temperature != 0:
            options |= {"temperature": float(self.temperature), "top_p": float(self.top_p), "top_k": int(self.top_k)}
        if self.repetition_penalty != 1.0:
            options["repetition_penalty"] = float(self.repetition_penalty)
        return options


class Progress(NamedTuple):
    """An answer so far.

    Attributes:
        steps: its parts in order.
        written: the model's own words of each round, and results of tools, as messages for the next turn.
        prompt_tokens, left_out: of the last round's prompt, see `ChatPrompt`.
        first_token_seconds: from the question to the first token; None before it.
        finish_reason: None while it goes on; as of a handle, "cancelled" if it was stopped.
    """

    steps: list[Step]
    written: list[Message]
    prompt_tokens: int
    left_out: int
    new_tokens: int
    first_token_seconds: float | None
    seconds: float
    finish_reason: str | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens after the first, by the time since it."""
        decoding = self.seconds - (self.first_token_seconds or 0.0)
        return (self.new_tokens - 1) / decoding if self.new_tokens > 1 and decoding > 0 else 0.0


class Answer:
    """One answer to one visitor; iterate over `stream()` once.

    Raises (from `stream`):
        HfpagedError, ValueError: the engine refuses the request; nothing was queued.
    """

    def __init__(self, host: Host, messages: Sequence[Message], sampling: Sampling, use_tools: bool = False):
        self._host = host
        self._messages = list(messages)
        self._sampling = sampling
        self._tools = [calculator.SCHEMA] if use_tools and host.takes_tools else []
        self._asked = time.perf_counter()
        self._first_token: float | None = None
        self._new_tokens = 0
        self._prompt = ChatPrompt([], 0, False)
        self._past: list[Step] = []
        self._written: list[Message] = []

    async def stream(self, scope: hfpaged.CancelScope) -> AsyncIterator[Progress]:
        """The answer again and again as it grows, the last time with a finish reason."""
        for rounds_left in reversed(range(MOST_TOOL_ROUNDS)):
            handle = await asyncio.to_thread(self._submit, scope)
            text = ""
            async for piece in self._pieces(handle):
                text += piece
                yield self._progress(parse(text, self._prompt.in_thought))
            steps = parse(text, self._prompt.in_thought, ended=True)
            self._write({"role": "assistant", "content": text})
            calls = [step for step in steps if step.kind == TOOL_CALL]
            if not (self._tools and calls and rounds_left and handle.finish_reason == "stop"):
                yield self._progress(steps, handle.finish_reason)
                return
            self._past += steps
            for call in calls:
                self._run(call)
            if not await asyncio.to_thread(self._can_go_on):
                yield self._progress([], "length")
                return

    def _run(self, call: Step) -> None:
        result = calculator.run_call(call.text)
        self._past.append(Step(TOOL_RESULT, result, done=True))
        self._write({"role": "tool", "name": calculator.NAME, "content": result})

    def _can_go_on(self) -> bool:
        """Whether there is room for another round."""
        try:
            self._make_prompt()
        except InputError:
            return False
        return True

    def _make_prompt(self) -> ChatPrompt:
        return self._host.chat_prompt(self._messages, int(self._sampling.max_new_tokens), self._tools)

    def _submit(self, scope: hfpaged.CancelScope) -> GenerationHandle:
        self._prompt = self._make_prompt()
        request: dict[str, Any] = {"scope": scope}
        if self._sampling.seed >= 0:
            request["seed"] = int(self._sampling.seed)
        return self._host.engine.submit(self._prompt.ids, **self._sampling.options(), hfpaged=request)

    async def _pieces(self, handle: GenerationHandle) -> AsyncIterator[str]:
        """New text, as soon as there is some, but no more often than the pace allows."""
        detokenizer = Detokenizer(self._host.tokenizer)
        waiting, last = "", 0.0
        # Stopped is an end like any other; the handle has the reason.
        with contextlib.suppress(RequestCancelled):
            async for token in handle:
                now = time.perf_counter()
                self._first_token = self._first_token or now
                self._new_tokens += 1
                waiting += detokenizer.push([token])
                if waiting and now - last >= seconds_between_updates(self._host.visitors.num_served):
                    yield waiting
                    waiting, last = "", now
        yield waiting + detokenizer.finish()

    def _write(self, message: Message) -> None:
        self._messages.append(message)
        self._written.append(message)

    def _progress(self, steps: list[Step], finish_reason: str | None = None) -> Progress:
        return Progress(
            steps=self._past + steps,
            written=list(self._written),
            prompt_tokens=len(self._prompt.ids),
            left_out=self._prompt.left_out,
            new_tokens=self._new_tokens,
            first_token_seconds=None if self._first_token is None else self._first_token - self._asked,
            seconds=time.perf_counter() - self._asked,
            finish_reason=finish_reason,
        )


def seconds_between_updates(num_served: int) -> float:
    """How long a text waits for more before it is sent, with so many growing at once."""
    return max(1 / MOST_UPDATES_PER_SECOND, num_served / MOST_UPDATES_PER_SECOND_FOR_ALL)
