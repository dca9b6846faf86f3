"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hfpaged.sampling.logprobs import TokenLogprob
from hfpaged.serving.api.answer import Answer
from hfpaged.serving.api.errors import unsupported
from hfpaged.serving.api.generation import Generation, Piece, merged
from hfpaged.serving.api.responses import ERRORS, Completion, whole_or_streamed
from hfpaged.serving.api.schemas import CompletionBody
from hfpaged.serving.api.scored_tokens import json_logprob, token_text
from hfpaged.serving.api.server_state import ServerState, log_user, stamp, state_of

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", responses={200: whole_or_streamed(Completion), **ERRORS})
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
    return await answer.respond(request)


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


class CompletionAnswer(Answer):
    """Continuations of the prompts, behind the prompts themselves where those are echoed."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self,
        state: ServerState,
        body: CompletionBody,
        stamp: dict[str, Any],
        generations: Sequence[Generation],
        echoes: Sequence[str],
    ):
        super().__init__(state, body, stamp, generations)
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]

    async def _whole_choices(self) -> list[dict[str, Any]]:
        texts = list(self._echoes)
        scores: list[dict[str, Any] | None] = [None] * len(texts)
        async for piece in merged(self._generations):
            texts[piece.index] += piece.text
            scores[piece.index] = _joined(scores[piece.index], self._logprobs(piece))
        return [
            {"index": one.index, "text": text, "logprobs": score, "finish_reason": one.finish_reason}
            for one, text, score in zip(self._generations, texts, scores, strict=True)
        ]

    async def _streamed_choices(self) -> AsyncIterator[dict[str, Any]]:
        for one, echo in zip(self._generations, self._echoes, strict=True):
            if echo:
                yield {"index": one.index, "text": echo, "logprobs": None, "finish_reason": None}
        async for piece in merged(self._generations):
            logprobs, reason = self._logprobs(piece), piece.finish_reason
            yield {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}

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
            "token_logprobs": [json_logprob(one.logprob) for one in piece.logprobs],
            "top_logprobs": [self._top(one) for one in piece.logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        # The likeliest of tokens that look the same.
        return {token_text(self._state.tokenizer, token): json_logprob(logprob) for token, logprob in reversed(one.top)}


def _joined(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    if before is None or after is None:
        return after
    return {name: before[name] + after[name] for name in before}
