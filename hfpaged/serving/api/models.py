"""The small endpoints: models, tokenize, detokenize, health, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from hfpaged.errors import EngineDeadError, HfpagedError
from hfpaged.serving.api.chat_prompt import chat_prompt
from hfpaged.serving.api.errors import ApiError
from hfpaged.serving.api.responses import ERRORS, Health, Model, ModelList, Text, Tokens
from hfpaged.serving.api.schemas import DetokenizeBody, TokenizeBody
from hfpaged.serving.api.server_state import ServerState, state_of
from hfpaged.serving.api.submit_options import longest_sequence

router = APIRouter()

ANSWER_SECONDS = 5.0
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Health}, 400: ERRORS[400], 405: ERRORS[405]}


@router.get("/v1/models", responses={200: {"model": ModelList}, **ERRORS})
async def list_models(request: Request) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(state_of(request))]})


@router.get("/v1/models/{name:path}", responses={200: {"model": Model}, **ERRORS})
async def show_model(name: str, request: Request) -> Response:
    """The model, by its name."""
    state_of(request).require_model(name)
    return JSONResponse(_model(state_of(request)))


@router.post("/tokenize", responses={200: {"model": Tokens}, **ERRORS})
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the model's chat template writes it."""
    state = state_of(request)
    state.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        tokens = await chat_prompt(state, body.messages, None)
    else:
        tokens = await state.encode(body.prompt, body.add_special_tokens, "prompt")
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": longest_sequence(state.client.info)})


@router.post("/detokenize", responses={200: {"model": Text}, **ERRORS})
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = state_of(request)
    state.require_model(body.model)
    unknown = [token for token in body.tokens if token >= len(state.tokenizer)]
    if unknown:
        raise ApiError(400, f"token {unknown[0]} is outside the vocabulary", param="tokens")
    return JSONResponse({"prompt": state.tokenizer.decode(body.tokens)})


@router.get("/health", responses={200: {"model": Health}, **NOT_READY})
@router.get("/health/ready", responses={200: {"model": Health}, **NOT_READY})
async def ready(request: Request) -> Response:
    """200 if the engine answers and new requests are taken, else 503."""
    status, detail = await _readiness(state_of(request))
    return JSONResponse({"status": status, "detail": detail}, 200 if status == "ready" else 503)


@router.get("/health/live", responses={200: {"model": Health}, 400: ERRORS[400], 405: ERRORS[405]})
async def live(request: Request) -> Response:
    """200 as long as this process answers, whatever the engine does."""
    return JSONResponse({"status": "draining" if state_of(request).is_draining else "ready", "detail": None})


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **ERRORS})
async def metrics(request: Request) -> Response:
    """For Prometheus. Without the engine's own numbers while it does not answer."""
    state = state_of(request)
    try:
        stats = await state.client.ask_async("stats", ANSWER_SECONDS)
    except (HfpagedError, TimeoutError):
        stats = {}
    return Response(state.metrics.render(stats), media_type="text/plain; version=0.0.4")


async def _readiness(state: ServerState) -> tuple[str, str | None]:
    if state.is_draining:
        return "draining", None
    if state.client.is_loading:
        return "loading", None
    try:
        await state.client.ask_async("stats", ANSWER_SECONDS)
    except EngineDeadError as error:
        return "dead", str(error)
    except (HfpagedError, TimeoutError) as error:
        return "dead", f"the engine does not answer: {error}"
    return "ready", None


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.name,
        "object": "model",
        "created": state.created,
        "owned_by": "hfpaged",
        "max_model_len": longest_sequence(state.client.info),
    }
