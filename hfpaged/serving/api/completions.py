"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from hfpaged.sampling.logprobs import TokenLogprob
from hfpaged.serving.api.connection_watch import EventStream, while_connected
from hfpaged.serving.api.errors import api_error_of, unsupported
from hfpaged.serving.api.generation import Generation, Piece, merged
from hfpaged.serving.api.responses import ERRORS, Completion
from hfpaged.serving.api.schemas import CompletionBody
from hfpaged.serving.api.server_state import ServerState, log_user, stamp, state_of, token_text

router = APIRouter()

DEFAULT_MAX_TOKENS = 16
DONE = b"[DONE]"


@router.post("/v1/completions", responses={200: {"model": Completion}, **ERRORS})
async def complete(body: CompletionBody, request: Request) -> Response:
    """Continue one or several prompts, given as text or as token ids."""
    state = state_of(request)
    state.require_model(body.model)
    _require_supported(body)
    log_user(request, body)
    prompts, texts = await _prompts(state, body)
    generations = state.begin(prompts, body, body.max_tokens, DEFAULT_MAX_TOKENS, body.logprobs)
    echoes = [text for text in texts for _ in range(body.num_choices)] if body.echo else [""] * len(generations)
    answer = CompletionAnswer(state, body, stamp("cmpl", request), generations, echoes)
    if body.stream:
        return EventStream(answer.events(), state.limits.stall_seconds, lambda: state.end(request, generations))
    try:
        whole = await while_connected(request.receive, answer.whole())
    finally:
        await state.end(request, generations)
    return Response(msgspec.json.encode(whole), media_type="application/json")


def _require_supported(body: CompletionBody) -> None:
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "echo together with logprobs is not supported")
    if body.stream_options is not None and not body.stream:
        raise unsupported("stream_options", "stream_options is for stream=true only")


async def _prompts(state: ServerState, body: CompletionBody) -> tuple[list[list[int]], list[str]]:
    """Token ids and text of each prompt."""
    given = body.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    prompts, texts = [], []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append(await state.encode(prompt, True, "prompt"))
            texts.append(prompt)
        else:
            prompts.append(prompt)
            texts.append(state.tokenizer.decode(_known(state, prompt)) if body.echo else "")
    return prompts, texts


def _known(state: ServerState, prompt: list[int]) -> list[int]:
    return [token for token in prompt if token < len(state.tokenizer)]


class CompletionAnswer:
    """The response body, whole or in chunks."""

    def __init__(
        self,
        state: ServerState,
        body: CompletionBody,
        stamp: dict[str, Any],
        generations: Sequence[Generation],
        echoes: Sequence[str],
    ):
        self._state, self._body, self._generations, self._echoes = state, body, generations, echoes
        self._head = {**stamp, "object": "text_completion", "model": state.name}
        self._offsets = [len(echo) for echo in echoes]

    async def whole(self) -> dict[str, Any]:
        """The response without streaming."""
        texts = list(self._echoes)
        scores: list[dict[str, Any] | None] = [None] * len(texts)
        async for piece in merged(self._generations):
            texts[piece.index] += piece.text
            scores[piece.index] = _joined(scores[piece.index], self._logprobs(piece))
        choices = [
            {"index": one.index, "text": text, "logprobs": score, "finish_reason": one.finish_reason}
            for one, text, score in zip(self._generations, texts, scores, strict=True)
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """The payloads of a stream. An error ends it with an error object."""
        try:
            for one, echo in zip(self._generations, self._echoes, strict=True):
                if echo:
                    yield self._chunk(one.index, echo, None, None)
            async for piece in merged(self._generations):
                yield self._chunk(piece.index, piece.text, self._logprobs(piece), piece.finish_reason)
            if self._body.reports_usage:
                yield msgspec.json.encode({**self._head, "choices": [], "usage": self._usage()})
            yield DONE
        except Exception as error:  # the response has begun: this is the only way to tell
            yield msgspec.json.encode(api_error_of(error).body())

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return msgspec.json.encode({**self._head, "choices": [choice]})

    def _usage(self) -> dict[str, int]:
        return self._state.usage(self._generations, self._body.num_choices)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokens = [token_text(self._state.tokenizer, one.token) for one in piece.logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[piece.index])
            self._offsets[piece.index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in piece.logprobs],
            "top_logprobs": [self._top(one) for one in piece.logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        # The likeliest of tokens that look the same.
        return {token_text(self._state.tokenizer, token): logprob for token, logprob in reversed(one.top)}


def _joined(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    if before is None or after is None:
        return after
    return {name: before[name] + after[name] for name in before}
