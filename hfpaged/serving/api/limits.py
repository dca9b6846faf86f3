"""ServerLimits: what one request, and all of them together, may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass

# Bounds that are part of the schema of requests.
MOST_CHOICES = 128
MOST_STOP_STRINGS = 16
LONGEST_STOP_STRING = 256
MOST_BIASES = 1024
MOST_TOP_LOGPROBS = 20
MOST_PROMPTS = 256
MOST_MESSAGES = 4096
MOST_TOOLS = 128
LARGEST_MAX_TOKENS = 1 << 22


@dataclass(frozen=True)
class ServerLimits:
    """Limits that an operator may change.

    Attributes:
        body_bytes: of a request.
        sequences: texts being generated or waiting at any time; more are refused with status 503.
        stall_seconds: how long a reader may take nothing before its request is cancelled.
        template_seconds: for rendering a conversation.
        drain_seconds: for running requests after SIGTERM.
    """

    body_bytes: int = 4 << 20
    sequences: int = 1024
    stall_seconds: float = 60.0
    template_seconds: float = 5.0
    drain_seconds: float = 30.0
