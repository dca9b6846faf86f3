"""Response bodies, as the OpenAPI document describes them. Handlers build them as dicts, which costs less a chunk."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answered(BaseModel):
    """Every object in an answer: it has these fields and no others."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Usage(Answered):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ErrorDetail(Answered):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answered):
    error: ErrorDetail


class CompletionLogprobs(Answered):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(Answered):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Answered):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class CalledFunction(Answered):
    name: str
    arguments: str


class AnswerToolCall(Answered):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Answered):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[AnswerToolCall] | None = None


class Alternative(Answered):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(Answered):
    content: list[ChatTokenLogprob]


class ChatChoice(Answered):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answered):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(Answered):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answered):
    object: Literal["list"]
    data: list[Model]


class Tokens(Answered):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(Answered):
    prompt: str


class Health(Answered):
    status: Literal["ready", "loading", "draining", "dead"]
    detail: str | None = None


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 413, 500, 503)
}


def whole_or_streamed(model: type[Answered]) -> dict[str, Any]:
    """A successful answer that is one JSON object, or server-sent events if the request asks for a stream."""
    return {"model": model, "content": {"text/event-stream": {}}}
