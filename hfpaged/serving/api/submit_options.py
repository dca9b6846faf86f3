"""What a client asks for, as keywords of `EngineClient.submit`, and how long its answer may become."""

from __future__ import annotations

import secrets
from typing import Any

from hfpaged.serving.api.errors import ApiError
from hfpaged.serving.api.schemas import SamplingBody
from hfpaged.serving.process.messages import ModelInfo

DEFAULT_TEMPERATURE = 1.0
# Below this, scores divided by it leave the range of float32; the limit is the likeliest token anyway.
GREEDY_BELOW = 1e-5
# 2**64 divided by the golden ratio: the seeds of a request's choices are far from each other.
SEED_STEP = 0x9E3779B97F4A7C15
SEED_MASK = (1 << 64) - 1


def submit_options(body: SamplingBody, info: ModelInfo, max_new_tokens: int, choice: int) -> dict[str, Any]:
    """Keywords of `EngineClient.submit` for one choice.

    Raises:
        ApiError: a field has a value that this model, or this length, does not allow.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if body.min_tokens:
        if body.min_tokens > max_new_tokens:
            raise ApiError(400, f"min_tokens is more than the {max_new_tokens} tokens allowed", param="min_tokens")
        options["min_new_tokens"] = body.min_tokens
    if body.ignore_eos:
        options["eos_token_id"] = -1
    penalty = body.repetition_penalty or info.defaults.get("repetition_penalty")
    options["repetition_penalty"] = float(penalty or 1.0)
    temperature = _first(body.temperature, info.defaults.get("temperature"), DEFAULT_TEMPERATURE)
    options["do_sample"] = temperature >= GREEDY_BELOW
    if options["do_sample"]:
        options["temperature"] = float(temperature)
        options["top_p"] = float(_first(body.top_p, info.defaults.get("top_p"), 1.0))
        options["top_k"] = _first(body.top_k, info.defaults.get("top_k"), 0)
        min_p = _first(body.min_p, info.defaults.get("min_p"), 0.0)
        if min_p:
            options["min_p"] = float(min_p)
    return {**options, "hfpaged": _extras(body, info, choice)}


def _extras(body: SamplingBody, info: ModelInfo, choice: int) -> dict[str, Any]:
    seed = secrets.randbits(63) if body.seed is None else (body.seed + choice * SEED_STEP) & SEED_MASK
    extras: dict[str, Any] = {"seed": seed, "cache_salt": body.cache_salt}
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(body, name):
            extras[name] = float(getattr(body, name))
    if body.logit_bias:
        bias = {int(token): value for token, value in body.logit_bias.items()}
        if max(bias) >= info.output_size:
            raise ApiError(
                400, f"token {max(bias)} is outside the vocabulary of {info.output_size}", param="logit_bias"
            )
        extras["logit_bias"] = bias
    return extras


def room_for(prompt_len: int, wanted: int | None, default: int | None, info: ModelInfo) -> int:
    """How many tokens a prompt's answer may have.

    Args:
        wanted: what the client asked for, which must fit.
        default: if it asked for nothing; None: all there is room for.

    Raises:
        ApiError: the prompt, or the prompt and what was asked for, is too long.
    """
    longest = longest_sequence(info)
    room = longest - prompt_len
    if room < 1 or (wanted or 1) > room:
        asked = f" and max_tokens={wanted}" if wanted else ""
        raise ApiError(
            400,
            f"{prompt_len} prompt tokens{asked} are more than the {longest} tokens that there is room for",
            param="max_tokens" if room >= 1 else "prompt",
            code="context_length_exceeded",
        )
    return wanted or min(room, default or room)


def longest_sequence(info: ModelInfo) -> int:
    """Tokens of the longest sequence that model and pool allow."""
    return min(info.max_length or info.capacity_tokens, info.capacity_tokens)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
