"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hfpaged.serving.api.answer import Answer
from hfpaged.serving.api.chat_prompt import chat_prompt, wants_tools
from hfpaged.serving.api.errors import unsupported
from hfpaged.serving.api.generation import Generation, Piece, merged
from hfpaged.serving.api.responses import ERRORS, ChatCompletion, whole_or_streamed
from hfpaged.serving.api.schemas import ChatBody
from hfpaged.serving.api.scored_tokens import json_logprob, token_text
from hfpaged.serving.api.server_state import ServerState, log_user, stamp, state_of
from hfpaged.serving.chat.tool_parser import Parsed, ToolCall, ToolFormat, ToolParser

router = APIRouter()


@router.post("/v1/chat/completions", responses={200: whole_or_streamed(ChatCompletion), **ERRORS})
async def chat(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    state.require_model(body.model)
    _require_supported(body)
    log_user(request, body)
    state.require_room(body.num_choices)
    prompt = await chat_prompt(state, body.messages, body.tools if wants_tools(body) else None, body)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    format = state.tool_format if wants_tools(body) else None
    generations = state.begin([prompt], body, wanted, None, logprobs, format.start if format else None)
    answer = ChatAnswer(state, body, stamp("chatcmpl", request), generations, format)
    return await answer.respond(request)


def _require_supported(body: ChatBody) -> None:
    if body.response_format is not None and body.response_format != {"type": "text"}:
        raise unsupported("response_format", "only response_format {'type': 'text'} is supported")
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool_choice must be 'none' or 'auto': calls cannot be enforced")
    if body.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "parallel_tool_calls=false is not supported")
    if body.top_logprobs is not None and not body.logprobs:
        raise unsupported("top_logprobs", "top_logprobs needs logprobs=true")
    if body.stream_options is not None and not body.stream:
        raise unsupported("stream_options", "stream_options is for stream=true only")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise unsupported("max_tokens", "give max_tokens or max_completion_tokens, not both")


class ChatAnswer(Answer):
    """Messages of the assistant, with the tool calls found in them."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        state: ServerState,
        body: ChatBody,
        stamp: dict[str, Any],
        generations: Sequence[Generation],
        format: ToolFormat | None,
    ):
        super().__init__(state, body, stamp, generations)
        self._parsers = [ToolParser(format) if format is not None else None for _ in generations]
        self._num_calls = [0] * len(generations)

    async def _whole_choices(self) -> list[dict[str, Any]]:
        texts = ["" for _ in self._generations]
        calls: list[list[dict[str, Any]]] = [[] for _ in self._generations]
        scores: list[list[dict[str, Any]]] = [[] for _ in self._generations]
        async for piece in merged(self._generations):
            parsed = self._parse(piece)
            texts[piece.index] += parsed.content
            calls[piece.index] += [self._call(piece.index, call) for call in parsed.calls]
            scores[piece.index] += self._logprobs(piece)
        choices = []
        for one in self._generations:
            message: dict[str, Any] = {"role": "assistant", "content": texts[one.index]}
            if calls[one.index]:
                message["content"] = texts[one.index].strip() or None
                message["tool_calls"] = [
                    {key: call[key] for key in call if key != "index"} for call in calls[one.index]
                ]
            choices.append(
                {
                    "index": one.index,
                    "message": message,
                    "logprobs": {"content": scores[one.index]} if self._body.logprobs else None,
                    "finish_reason": self._finish_reason(one.index, one.finish_reason),
                }
            )
        return choices

    async def _streamed_choices(self) -> AsyncIterator[dict[str, Any]]:
        for one in self._generations:
            yield self._choice(one.index, {"role": "assistant", "content": ""})
        async for piece in merged(self._generations):
            for choice in self._choices(piece):
                yield choice

    def _choices(self, piece: Piece) -> list[dict[str, Any]]:
        parsed = self._parse(piece)
        scores = self._logprobs(piece)
        choices = []
        if parsed.content or scores:
            choices.append(self._choice(piece.index, {"content": parsed.content}, scores))
        for call in parsed.calls:
            choices.append(self._choice(piece.index, {"tool_calls": [self._call(piece.index, call)]}))
        if piece.finish_reason is not None:
            reason = self._finish_reason(piece.index, piece.finish_reason)
            choices.append(self._choice(piece.index, {}, finish_reason=reason))
        return choices

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        scores: Sequence[dict[str, Any]] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = {"content": scores} if scores else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _parse(self, piece: Piece) -> Parsed:
        parser = self._parsers[piece.index]
        if parser is None:
            return Parsed(piece.text)
        parsed = parser.push(piece.text)
        if piece.finish_reason is not None:
            rest = parser.finish()
            parsed = Parsed(parsed.content + rest.content, parsed.calls + rest.calls)
        return parsed

    def _call(self, index: int, call: ToolCall) -> dict[str, Any]:
        number = self._num_calls[index]
        self._num_calls[index] += 1
        return {
            "index": number,
            "id": f"call_{self._stamp['id'].rsplit('-', 1)[-1]}_{index}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if self._num_calls[index] and reason == "stop" else reason

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        return [
            {
                **self._scored(one.token, one.logprob),
                "top_logprobs": [self._scored(token, logprob) for token, logprob in one.top],
            }
            for one in piece.logprobs
        ]

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text = token_text(self._state.tokenizer, token)
        return {"token": text, "logprob": json_logprob(logprob), "bytes": list(text.encode(errors="replace"))}
