"""LiveRequests: all requests of an engine that have not ended. What their callers send them, and what they get."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hfpaged.core.plan import Plan
from hfpaged.errors import AdapterLostError
from hfpaged.runtime.drawing import Outcome
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.live_request import LiveRequest
from hfpaged.runtime.speculation import Speculation
from hfpaged.runtime.workspace import Workspace
from hfpaged.runtime.workspaces import Workspaces
from hfpaged.sampling.sampler import SampleRow
from hfpaged.sampling.stop import StopChecker


class LiveRequests:
    """Used by the stepping thread only, between two steps.

    Attributes:
        by_id: always the same dict; others only look.
    """

    def __init__(self, workspaces: Workspaces, speculation: Speculation):
        self.by_id: dict[int, LiveRequest] = {}
        self._workspaces = workspaces
        self._speculation = speculation
        self._stops = StopChecker()

    # ---- from their callers ----

    def add(self, live: LiveRequest, fork_of: int | None) -> None:
        """Queue a request where new ones go.

        Args:
            fork_of: id of the request with the same prompt whose blocks it may share.
        """
        self._workspaces.current.scheduler.add(live.request, fork_of)
        self.by_id[live.request.id] = live

    def feed(self, tokens: Iterable[tuple[GenerationHandle, list[int] | None]], logits_for: int) -> None:
        """Append the next tokens of steered requests; None ends one. Ended requests are ignored."""
        for handle, new_tokens in tokens:
            if new_tokens is None:
                self.end([handle], "stop")
            elif handle.request_id in self.by_id:
                scheduler = self._workspaces.holding(handle.request_id).scheduler
                scheduler.append_tokens(handle.request_id, new_tokens, logits_for)

    def fork(self, parents: Iterable[GenerationHandle], children: Iterable[GenerationHandle]) -> None:
        """Add a copy of each parent. One whose parent has ended ends too."""
        for parent, child in zip(parents, children, strict=True):
            live = self.by_id.get(parent.request_id)
            if live is None:
                child.finish("cancelled")
                continue
            request = live.request.copy(child.request_id)
            self._workspaces.holding(parent.request_id).scheduler.fork(parent.request_id, request)
            self.by_id[request.id] = LiveRequest(live.spec, child, request, SampleRow(request.tokens))

    def rollback(self, handles: Iterable[GenerationHandle], count: int) -> None:
        """Forget the last tokens of steered requests. Ended ones are ignored."""
        for handle in handles:
            if handle.request_id in self.by_id:
                self._workspaces.holding(handle.request_id).scheduler.rollback(handle.request_id, count)

    # ---- from the steps ----

    def note_started(self, plan: Plan, now: float) -> None:
        """Tell the handles of requests that are in a step for the first time."""
        for entry in plan.entries:
            if entry.full_table is not None:
                self.by_id[entry.id].handle.begin(now)

    def deliver(self, outcomes: Sequence[Outcome]) -> None:
        """Hand tokens to their callers, and end the requests that have ended."""
        try:
            ended = self._stops.finished([(one.live.request.tokens, one.live.spec.stop) for one in outcomes])
        except Exception as error:
            self.end([outcome.live.handle for outcome in outcomes], "error", error)
            return
        for outcome, has_ended in zip(outcomes, ended, strict=True):
            live = outcome.live
            if outcome.error is not None:
                self.end([live.handle], "error", outcome.error)
                continue
            if live.wants_logits:
                scores = outcome.scores if live.spec.keep_scores else ()
                logits = outcome.logits if live.spec.keep_logits else ()
                live.handle.push(outcome.tokens, outcome.logprobs, scores, logits)
            else:
                live.handle.push(outcome.tokens)
            if has_ended:
                self.end([live.handle], "length" if len(live.request.tokens) >= live.spec.max_tokens else "stop")

    # ---- their ends ----

    def end(self, handles: Iterable[GenerationHandle], reason: str, error: BaseException | None = None) -> None:
        """End requests, wherever they are, and free what they hold. Ended ones are ignored."""
        for handle in handles:
            live = self.by_id.pop(handle.request_id, None)
            self._speculation.forget(handle.request_id)
            if live is not None:
                workspace = self._workspaces.holding(handle.request_id)
                workspace.scheduler.finish(handle.request_id)
                workspace.runner.forget(handle.request_id)
                self._workspaces.drop_if_unused(workspace)
            handle.finish(reason, error)

    def end_all(self, error: BaseException) -> None:
        """End all that are there with this error."""
        self.end([live.handle for live in self.by_id.values()], "error", error)

    def end_without_adapter(self, workspace: Workspace) -> None:
        """End the requests whose adapter was deleted or merged since they began."""
        requests = [self.by_id[request_id] for request_id in workspace.scheduler.requests]
        lost = {name: workspace.adapters.why_lost(name) for name in {live.spec.adapter for live in requests}}
        for live in requests:
            reason = lost[live.spec.adapter]
            if reason is not None:
                self.end([live.handle], "error", AdapterLostError(reason))

    def lose_all(self, error: BaseException) -> None:
        """End all with this error without a word to the books, which may be wrong."""
        handles = [live.handle for live in self.by_id.values()]
        self.by_id.clear()
        for handle in handles:
            handle.finish("error", error)

    def abandon(self) -> None:
        """The process is exiting, so no step will come any more."""
        for live in self.by_id.values():
            live.handle.abandon()
