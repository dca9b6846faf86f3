"""What the client and the engine's process say to each other: msgpack, typed, bounded, and nothing that is code."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.msgpack import Decoder, Encoder

from hfpaged.sampling.logprobs import TokenLogprob

MOST_PROMPT_TOKENS = 1 << 22
LARGEST_MESSAGE = 64 << 20

RequestId = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=-1, lt=1 << 31)]
Prompt = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(min_length=1, max_length=MOST_PROMPT_TOKENS)]
QueryName = Literal["stats", "check", "reset_prefix_cache", "weights_changed", "release"]


class RequestExtras(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The per-request options of hfpaged, see README. Unset ones are the engine's defaults."""

    seed: int | UnsetType = UNSET
    cache_salt: Annotated[str, Meta(max_length=256)] | UnsetType = UNSET
    priority: Annotated[int, Meta(ge=-(1 << 30), le=1 << 30)] | UnsetType = UNSET
    prefix_cache: bool | UnsetType = UNSET
    logprobs: Annotated[int, Meta(ge=0, le=100)] | UnsetType = UNSET
    prompt_logprobs: Annotated[int, Meta(ge=0, le=100)] | UnsetType = UNSET
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] | UnsetType = UNSET
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] | UnsetType = UNSET
    logit_bias: Annotated[dict[Annotated[int, Meta(ge=0)], float], Meta(max_length=4096)] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.seed is not UNSET and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {self.seed}")
        _require_finite(self)
        if self.logit_bias is not UNSET and not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise ValueError("logit_bias must have finite numbers")


class SubmitOptions(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options of `generate` that may cross the process boundary. Unset ones are the model's own.

    `eos_token_id` takes the place of the model's end tokens; -1 ends no sequence.
    """

    max_new_tokens: Annotated[int, Meta(ge=1, le=MOST_PROMPT_TOKENS)] | UnsetType = UNSET
    min_new_tokens: Annotated[int, Meta(ge=0, le=MOST_PROMPT_TOKENS)] | UnsetType = UNSET
    do_sample: bool | UnsetType = UNSET
    temperature: Annotated[float, Meta(gt=0, le=1000)] | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    min_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    typical_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] | UnsetType = UNSET
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=1024)] | UnsetType = UNSET
    eos_token_id: TokenId | Annotated[list[TokenId], Meta(max_length=256)] | UnsetType = UNSET
    hfpaged: RequestExtras | UnsetType = UNSET

    def __post_init__(self) -> None:
        _require_finite(self)


def _require_finite(options: Struct) -> None:
    # Comparisons with NaN are false, so bounds let it through.
    for name in options.__struct_fields__:
        value = getattr(options, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}")


class Fault(Struct, frozen=True, array_like=True):
    """An exception on its way to the other process: name of its class, its message, its numbers if it has any."""

    kind: str
    message: str
    numbers: list[int] = []


class ModelInfo(Struct, frozen=True):
    """What the client must know about the model that the process has loaded.

    Attributes:
        vocab_size: token ids a prompt may have.
        output_size: token ids that can come out.
        max_length: most tokens of a sequence that the model's positions allow; None: not known.
        capacity_tokens: most tokens of a sequence that the KV pool has room for.
        defaults: sampling options that the model's own generation config sets.
    """

    model_type: str
    dtype: str
    vocab_size: int
    output_size: int
    max_length: int | None
    block_size: int
    num_blocks: int
    eos_token_ids: list[int]
    defaults: dict[str, float | bool | None]

    @property
    def capacity_tokens(self) -> int:
        return self.block_size * self.num_blocks


class Output(Struct, frozen=True, array_like=True):
    """News of one request: its tokens since the last message, and its end.

    Attributes:
        queue_seconds: how long it waited for its first step; sent once, with the first news after it.
        logprobs: of the tokens, if asked for.
        prompt_logprobs: of the prompt's, if asked for, with the first news.
    """

    id: RequestId
    tokens: list[int]
    finish_reason: str | None = None
    fault: Fault | None = None
    queue_seconds: float | None = None
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob | None] = []


# ---- from the client ----


class Submit(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One prompt to generate from."""

    id: RequestId
    prompt: Prompt
    options: SubmitOptions


class Cancel(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """End a request; unknown ids are those that have just ended."""

    id: RequestId


class Query(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Call one of the engine's methods; answered by a `Reply`."""

    id: RequestId
    name: QueryName


class Stop(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """End the process now."""


# ---- from the engine's process ----


class Loading(Struct, frozen=True, tag=True):
    """How far the process has come in its start. `fraction` is that of the stage, from 0 to 1."""

    stage: str
    fraction: float


class Ready(Struct, frozen=True, tag=True):
    """The process takes requests."""

    info: ModelInfo


class Progress(Struct, frozen=True, tag=True):
    """News of all requests that have any: one message for a step, or for several if the client is slower."""

    outputs: list[Output]


class Reply(Struct, frozen=True, tag=True):
    """Answer to a `Query`."""

    id: RequestId
    value: Any = None
    fault: Fault | None = None


class Fatal(Struct, frozen=True, tag=True):
    """Why the process is about to end."""

    fault: Fault


Request = Submit | Cancel | Query | Stop
Report = Loading | Ready | Progress | Reply | Fatal


def encode(message: Request | Report) -> bytes:
    """The message as msgpack."""
    return Encoder().encode(message)


def request_decoder() -> Decoder:
    """Decodes and checks what a client sends. Its `decode` raises ValidationError."""
    return Decoder(Request)


def report_decoder() -> Decoder:
    """Decodes and checks what the engine's process sends. Its `decode` raises ValidationError."""
    return Decoder(Report)
