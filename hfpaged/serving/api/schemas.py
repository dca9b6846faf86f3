"""Request bodies. What a field may be is said here and checked before anything else; unknown fields are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from hfpaged.serving.api.limits import (
    LARGEST_MAX_TOKENS,
    LONGEST_STOP_STRING,
    MOST_BIASES,
    MOST_CHOICES,
    MOST_MESSAGES,
    MOST_PROMPTS,
    MOST_STOP_STRINGS,
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
)

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_STOP_STRING)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedToken = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Count = Annotated[int, Field(ge=1, le=LARGEST_MAX_TOKENS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


class Body(BaseModel):
    """Every object in a request: no coercion, no NaN, no fields that nobody reads."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False


class SamplingBody(Body):
    """What completions and chat completions have in common. From `top_k` on: hfpaged's own fields."""

    model: Name
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Count | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOP_STRINGS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[BiasedToken, Bias], Field(max_length=MOST_BIASES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=256)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST_MAX_TOKENS)] | None = None
    ignore_eos: bool = False
    cache_salt: Annotated[str, StringConstraints(max_length=256)] = ""

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def reports_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(SamplingBody):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    echo: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: Name
    arguments: str


class MessageToolCall(Body):
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: Name | None = None


class FunctionDefinition(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class ChatBody(SamplingBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: Annotated[dict[Variable, bool | int | str], Field(max_length=16)] | None = None


class TokenizeBody(Body):
    """Of a text, or of a conversation as the model would see it."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: list[TokenId]
