"""ServerState: what all handlers share, and how they submit requests with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from transformers import PreTrainedTokenizerBase

from hfpaged.serving.api.errors import ApiError
from hfpaged.serving.api.generation import Generation, make_detokenizer
from hfpaged.serving.api.limits import ServerLimits
from hfpaged.serving.api.metrics import Metrics
from hfpaged.serving.api.schemas import SamplingBody
from hfpaged.serving.api.submit_options import room_for, submit_options
from hfpaged.serving.chat.template import ChatTemplate
from hfpaged.serving.chat.tool_parser import ToolFormat
from hfpaged.serving.process.client import EngineClient
from hfpaged.serving.process.messages import ModelInfo
from hfpaged.text.surrogates import has_lone_surrogate


@dataclass
class ServerState:
    """One server's model and engine.

    Attributes:
        name: of the model, in requests and answers.
        template: None if the model has none, and so no chat.
        tool_format: None if the model is not known to call tools.
        is_draining: no new texts are begun; the process is about to end.
    """

    name: str
    client: EngineClient
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate | None
    tool_format: ToolFormat | None
    limits: ServerLimits = field(default_factory=ServerLimits)
    metrics: Metrics = field(default_factory=Metrics)
    is_draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    num_open: int = 0

    def require_model(self, name: str | None) -> None:
        """Raise ApiError unless `name` is the served model's."""
        if name is not None and name != self.name:
            raise ApiError(
                404, "this server has no model of that name; see /v1/models", param="model", code="model_not_found"
            )

    def require_room(self, count: int) -> ModelInfo:
        """Raise ApiError unless so many texts can be begun now; returns the model's."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
        info = self.client.info
        if self.num_open + count > self.limits.sequences:
            raise ApiError(503, "too many requests at the moment", kind="server_error", code="overloaded")
        return info

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text, without holding the event loop up.

        Raises:
            ApiError: the text has no tokens, or is none; `param` is the field to name.
        """
        if has_lone_surrogate(text):
            raise ApiError(400, f"{param} has a lone surrogate, which is no character", param=param)
        ids = await asyncio.to_thread(lambda: self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        if not ids:
            raise ApiError(400, f"{param} has no tokens", param=param)
        return ids

    def begin(
        self,
        prompts: Sequence[list[int]],
        body: SamplingBody,
        max_tokens: int | None,
        default_max_tokens: int | None,
        logprobs: int | None,
        kept_marker: str | None = None,
    ) -> list[Generation]:
        """Submit `num_choices` requests for each prompt, all or none.

        Args:
            kept_marker: a special token that must show in the text.

        Raises:
            ApiError, HfpagedError: nothing runs.
        """
        info = self.require_room(len(prompts) * body.num_choices)
        dropped = self._dropped_ids(kept_marker)
        generations: list[Generation] = []
        try:
            for prompt in prompts:
                room = room_for(len(prompt), max_tokens, default_max_tokens, info)
                for choice in range(body.num_choices):
                    options = submit_options(body, info, room, choice)
                    if logprobs is not None:
                        options["hfpaged"]["logprobs"] = logprobs
                    handle = self.client.submit(prompt, **options)
                    detokenizer = make_detokenizer(self.tokenizer, body, keep_special=bool(dropped))
                    generations.append(
                        Generation(len(generations), handle, detokenizer, bool(body.stop_strings), dropped)
                    )
        except Exception:  # whatever it is, the choices that were begun would run for nobody
            for generation in generations:
                generation.handle.cancel()
            raise
        self.num_open += len(generations)
        return generations

    async def end(self, request: Request, generations: Sequence[Generation]) -> None:
        """Whatever happened to them: cancel those that run, and account for all."""
        self.num_open -= len(generations)
        for generation in generations:
            generation.handle.cancel()
        self.metrics.observe(generations, time.perf_counter())
        request.state.log["prompt_tokens"] = generations[0].handle.prompt_len
        request.state.log["completion_tokens"] = sum(generation.num_tokens for generation in generations)
        request.state.log["finish_reason"] = ",".join(
            sorted({generation.finish_reason or "cancelled" for generation in generations})
        )

    def usage(self, generations: Sequence[Generation], num_choices: int) -> dict[str, int]:
        """Token counts; a prompt with several choices counts once."""
        prompt = sum(generation.handle.prompt_len for generation in generations[::num_choices])
        completion = sum(generation.num_tokens for generation in generations)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _dropped_ids(self, kept_marker: str | None) -> frozenset[int]:
        """Special tokens to leave out one by one, if one of them must show; else none, the detokenizer does it."""
        if kept_marker is None or kept_marker not in self.tokenizer.all_special_tokens:
            return frozenset()
        return frozenset(self.tokenizer.all_special_ids) - {self.tokenizer.convert_tokens_to_ids(kept_marker)}


def state_of(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    return request.app.state.server


def log_user(request: Request, body: SamplingBody) -> None:
    """The client's name for its own user goes to the access log, and nowhere else."""
    if body.user is not None:
        request.state.log["user"] = body.user


def stamp(prefix: str, request: Request) -> dict[str, Any]:
    """Id and time of an answer."""
    return {"id": f"{prefix}-{request.state.log['request_id']}", "created": int(time.time())}
