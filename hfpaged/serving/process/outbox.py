"""Outbox: news of running requests, gathered from their handles when there is room to send them."""

from __future__ import annotations

from dataclasses import dataclass

from hfpaged.runtime.handle import GenerationHandle
from hfpaged.serving.process.faults import fault_of
from hfpaged.serving.process.messages import Output


@dataclass
class _Running:
    handle: GenerationHandle
    sent: int = 0
    queue_time_is_known: bool = False


class Outbox:
    """The handles of requests that have not been reported as ended, by the client's ids.

    Tokens wait in the handles, where the engine puts them. So a client that reads slowly gets fewer and longer messages
    and nothing piles up on the way.
    """

    def __init__(self) -> None:
        self._running: dict[int, _Running] = {}

    def add(self, request_id: int, handle: GenerationHandle) -> None:
        """Report on this request from now on, until it ends."""
        self._running[request_id] = _Running(handle)

    def cancel(self, request_id: int) -> None:
        """Cancel a request; does nothing for one that has ended."""
        running = self._running.get(request_id)
        if running is not None:
            running.handle.cancel()

    def collect(self) -> list[Output]:
        """What is new since the last time. Each piece of news is returned once."""
        outputs = []
        for request_id, running in list(self._running.items()):
            output = _news(request_id, running)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    del self._running[request_id]
        return outputs


def _news(request_id: int, running: _Running) -> Output | None:
    handle = running.handle
    # Before the tokens: the last ones come before the end.
    reason = handle.finish_reason
    if reason is None and len(handle.tokens) == running.sent:
        return None
    tokens = handle.tokens[running.sent :]
    running.sent += len(tokens)
    first = running.sent == len(tokens)
    queue_seconds = None
    if not running.queue_time_is_known and handle.started_at is not None:
        running.queue_time_is_known = True
        queue_seconds = handle.started_at - handle.submitted_at
    fault = fault_of(handle.error) if handle.error is not None else None
    return Output(
        request_id,
        tokens,
        reason,
        fault,
        queue_seconds,
        logprobs=handle.logprobs[running.sent - len(tokens) : running.sent],
        prompt_logprobs=list(handle.prompt_logprobs) if first else [],
    )
