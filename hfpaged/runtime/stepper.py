"""Stepper: what the stepping thread does. Admits requests, plans, runs, draws, commits and delivers, step by step.

All methods run on one thread, between steps or as one, so the books need no lock. A step is plan, run, commit: until
the commit nothing has changed, and a failed step is tried once more before its requests fail.

On a device that works behind the host, a step is committed when it has been launched, and the next one is launched
before its tokens are read: they are settled in the books, and delivered, a step late. A request that ended meanwhile
has then drawn a token too many, which is dropped. One whose tokens only the host can draw sits out every other step.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from hfpaged.config import EngineConfig
from hfpaged.core.invariants import check as check_books
from hfpaged.core.plan import Plan
from hfpaged.core.prefix_cache import root_key
from hfpaged.core.snapshot import BooksSnapshot, snapshot
from hfpaged.errors import CorruptOutputError, EngineReleasedError, FusionsDisabledError
from hfpaged.quantization.summary import is_quantized
from hfpaged.runtime.computed_step import ComputedStep
from hfpaged.runtime.device.launched_step import LaunchedStep
from hfpaged.runtime.device.settlement import settle
from hfpaged.runtime.draft_model import DraftModel
from hfpaged.runtime.drawing import draw_tokens, offer_logits, score_prompts, takers_of, wants_logits
from hfpaged.runtime.handle import GenerationHandle
from hfpaged.runtime.live_request import LiveRequest
from hfpaged.runtime.live_requests import LiveRequests
from hfpaged.runtime.model_watch import ModelWatch
from hfpaged.runtime.patched_class import unpatched_class
from hfpaged.runtime.request_spec import RequestSpec
from hfpaged.runtime.sentinel import FusionsDisagree, Sentinel
from hfpaged.runtime.speculation import Speculation
from hfpaged.runtime.stats import EngineCounters
from hfpaged.runtime.tier_choice import FUSIONS_OFF
from hfpaged.runtime.workspace import Workspace
from hfpaged.runtime.workspaces import Workspaces
from hfpaged.sampling.sampler import Sampler

logger = logging.getLogger(__name__)


class Stepper:
    """The engine's state and its steps.

    Args:
        runs_ahead: launch a step before reading the one before, on devices that work behind the host.

    Attributes:
        requests: those that have not ended.
        workspaces: where they are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        original_class: type[PreTrainedModel],
        config: EngineConfig,
        counters: EngineCounters,
        runs_ahead: bool = True,
    ):
        # Named, so that nothing it is given refers to this object: the model would wait for the collector.
        self.workspaces = workspaces = Workspaces(model, original_class, counters)
        self._config = config
        self._runs_ahead = runs_ahead
        self._counters = counters
        self._model_watch = ModelWatch(workspaces, watch_content=config.weights == "watch")
        self._speculation = Speculation()
        self.requests = LiveRequests(workspaces, self._speculation)
        self._epoch = 0
        self._failed_once: weakref.WeakSet[Workspace] = weakref.WeakSet()
        self._sentinel: Sentinel | None = None
        if is_quantized(model) if config.sentinel is None else config.sentinel:
            self._sentinel = Sentinel(workspaces.new_view, counters)
        self._sampler = Sampler()

    @property
    def live(self) -> Mapping[int, LiveRequest]:
        """Requests that have not ended, by id."""
        return self.requests.by_id

    # ---- new requests ----

    def prepare(self, spec: RequestSpec) -> Workspace:
        """Build the workspace if there is none yet, so that its capacity is known."""
        return self.workspaces.prepare(self._config, spec)

    def capture_ahead(self) -> int:
        """Capture what the steps of requests like the last ones will need. Returns how many steps were captured."""
        current = self.workspaces.current
        return 0 if current is None else current.tier.capture_ahead(self._config.max_requests)

    def admit(self, specs: Sequence[RequestSpec], handles: Sequence[GenerationHandle]) -> None:
        """Queue the rows of one call. Whatever goes wrong ends all of them with that error, and nothing else."""
        try:
            self._freshen(specs[0])
            for spec, handle in zip(specs, handles, strict=True):
                self._add(spec, handle, handles)
        except Exception as error:
            self.requests.end(handles, "error", error)

    def give_up(self, error: BaseException) -> None:
        """Nothing foresaw this error, so the books may be wrong: end all requests with it and start anew."""
        self.requests.lose_all(error)
        self._speculation.release()
        self.workspaces.drop_all()

    # ---- the step ----

    def step(self) -> bool:
        """Do one step. Returns False when nothing can be done until the next command."""
        self._model_watch.on_step()
        if not self.live:
            return self._on_idle()
        self._propose_drafts()
        return any(self._step(workspace) for workspace in self.workspaces.in_turn())

    def _step(self, workspace: Workspace) -> bool:
        """Plan a step, carry it out and commit it. Returns False when there is nothing to do in the workspace."""
        if workspace.adapters is not None:
            self.requests.end_without_adapter(workspace)
        began = time.perf_counter()
        plan = workspace.scheduler.plan()
        planned = time.perf_counter()
        self._counters.times.schedule += planned - began
        if plan is None:
            return self._settle_oldest(workspace)
        self.requests.note_started(plan, planned)
        carry_out = self._compute if workspace.launcher is None else self._launch
        try:
            if workspace.adapters is not None:
                workspace.adapters.assign(plan, {entry.id: self.live[entry.id].spec.adapter for entry in plan.entries})
            step, ran = carry_out(workspace, plan)
        except FusionsDisagree:
            self._on_corrupt_fusions(workspace, plan)
            return True
        except Exception as error:
            self._on_failed_step(workspace, plan, error)
            return True
        self._failed_once.discard(workspace)
        if isinstance(step, LaunchedStep):
            self._commit_launched(workspace, step)
        else:
            self._commit_computed(workspace, step)
            self._speculation.step_cost.record(plan.num_tokens, time.perf_counter() - began)
        self._count_step(planned, ran)
        return True

    def _count_step(self, planned: float, ran: float) -> None:
        times = self._counters.times
        times.steps += 1
        times.forward += ran - planned
        times.sample += time.perf_counter() - ran

    def _propose_drafts(self) -> None:
        """Let requests that speculate guess ahead, where one token is all they have left to compute."""
        spare = self._config.max_batch_tokens - len(self.live)
        for request_id, tokens in self._speculation.propose(spare, len(self.live)).items():
            self.workspaces.holding(request_id).scheduler.append_drafts(request_id, tokens)

    # ---- steps that are waited for ----

    def _compute(self, workspace: Workspace, plan: Plan) -> tuple[ComputedStep, float]:
        """Run the forward of a step and draw its tokens. Returns it, and when the forward had been run."""
        takers = takers_of(plan, self.live)
        output = workspace.runner.run(plan, wants_logits(plan, takers))
        if self._sentinel is not None:
            self._sentinel.check_numbers(workspace, plan, output)
        ran = time.perf_counter()
        outcomes = draw_tokens(takers, output, self._sampler)
        if self._sentinel is not None:
            self._sentinel.check_tokens(workspace, plan, self.live, outcomes)
        return ComputedStep(plan, output, takers, outcomes, score_prompts(plan, self.live, output)), ran

    def _commit_computed(self, workspace: Workspace, step: ComputedStep) -> None:
        """Enter a computed step in the books, and deliver what it brought."""
        accepted = step.accepted()
        for outcome in step.outcomes:
            request = outcome.live.request
            if request.draft_tokens:
                self._speculation.learn(request.id, request.draft_tokens, accepted.get(request.id, 0))
        workspace.scheduler.commit(step.plan, step.sampled(), accepted)
        workspace.runner.commit(step.plan)
        offer_logits(step.takers, step.output)
        for request_id, logprobs in step.prompt_logprobs.items():
            self.live[request_id].handle.add_prompt_logprobs(logprobs)
        self.requests.deliver(step.outcomes)

    # ---- steps ahead of a device ----

    def _launch(self, workspace: Workspace, plan: Plan) -> tuple[LaunchedStep, float]:
        """Queue a step and its draws. Returns it, and when its forward had been queued."""
        draws = workspace.launcher.prepare(plan, self.live)
        output = workspace.runner.run(plan, wants_logits(plan, takers_of(plan, self.live)), draws.table)
        ran = time.perf_counter()
        return workspace.launcher.launch(plan, self.live, draws, output, self._sentinel is not None), ran

    def _commit_launched(self, workspace: Workspace, launched: LaunchedStep) -> None:
        """Take a launched step over, and settle the one before."""
        if launched.requests:
            workspace.tier.feed_back(launched.drawn)
        workspace.scheduler.commit(launched.plan, launched.sampled())
        workspace.runner.commit(launched.plan, [live.request.id for live in launched.requests])
        self._counters.ahead.steps_ahead += bool(workspace.in_flight)
        self._counters.ahead.host_drawn_tokens += len(launched.on_host)
        workspace.in_flight.append(launched)
        while len(workspace.in_flight) > (1 if self._runs_ahead else 0):
            self._settle_oldest(workspace)

    def _settle_oldest(self, workspace: Workspace) -> bool:
        """Read the oldest step in flight and deliver what it brought. Returns False if there is none."""
        if not workspace.in_flight:
            return False
        launched = workspace.in_flight.popleft()
        try:
            if self._sentinel is not None:
                self._sentinel.check_launched(workspace, launched, self.live)
            settled = settle(launched, workspace.scheduler, self.live, self._sampler, self._speculation.learn)
        except FusionsDisagree:
            self._on_corrupt_fusions(workspace, None)
            return True
        except Exception as error:
            # It was committed, so that it cannot be tried again.
            self._counters.failed_steps += 1
            self.requests.end(
                [live.handle for live in launched.members() if live.request.id in self.live], "error", error
            )
            return True
        self._counters.ahead.dropped_tokens += settled.dropped
        for live, logits in settled.steered:
            live.handle.offer_logits(logits)
        for live, logprobs in settled.scored:
            live.handle.add_prompt_logprobs(logprobs)
        self.requests.deliver(settled.outcomes)
        return True

    def _on_failed_step(self, workspace: Workspace, plan: Plan, error: Exception) -> None:
        workspace.scheduler.abort(plan)
        workspace.runner.abort(plan)
        # The steps before it did not fail: what they drew is known when it is tried again, or its requests end.
        while self._settle_oldest(workspace):
            pass
        self._counters.failed_steps += 1
        if workspace not in self._failed_once and not isinstance(error, CorruptOutputError):
            self._failed_once.add(workspace)
            return
        self._failed_once.discard(workspace)
        failed = {entry.id for entry in plan.entries} | {request_id for _, request_id in plan.sampled_rows()}
        self.requests.end([self.live[request_id].handle for request_id in failed], "error", error)

    def _on_corrupt_fusions(self, workspace: Workspace, plan: Plan | None) -> None:
        """Fused code is not used for this model any more, and whatever it computed is computed again.

        Args:
            plan: of the step that was not committed, if there is one. What is in flight is forgotten.
        """
        logger.warning("hfpaged: %s; they are off from now on, and running requests begin again", FUSIONS_OFF)
        self._counters.sentinel_corruptions += 1
        if plan is not None:
            workspace.scheduler.abort(plan)
            workspace.runner.abort(plan)
        workspace.in_flight.clear()
        self.workspaces.stop_fusing()
        workspace.switch_to(*self._sentinel.plain_tier(workspace), FUSIONS_OFF)
        self.drop_prefixes()
        for request_id in list(workspace.scheduler.requests):
            self._restart(workspace, self.live[request_id])

    def _restart(self, workspace: Workspace, live: LiveRequest) -> None:
        if live.spec.steered:
            # Whoever steers it has gone on from wrong logits.
            self.requests.end([live.handle], "error", FusionsDisabledError())
            return
        workspace.scheduler.finish(live.handle.request_id)
        workspace.runner.forget(live.handle.request_id)
        self._speculation.forget(live.handle.request_id)
        live.handle.restart()
        self._add(replace(live.spec, fork_of=None), live.handle, ())

    def _on_idle(self) -> bool:
        for workspace in self.workspaces:
            # Whoever wanted what they bring has left.
            self._counters.ahead.dropped_tokens += sum(len(step.requests) for step in workspace.in_flight)
            workspace.in_flight.clear()
        if self._config.release_after_call:
            self.release()
        return False

    # ---- weights, prefixes, memory ----

    def drop_prefixes(self) -> None:
        """Forget all cached prefixes; running requests go on, and their blocks stay out of the cache."""
        self._epoch += 1
        self.workspaces.reset_prefix_caches()

    def on_weights_changed(self) -> None:
        """Drop everything that was computed with the old weights."""
        self._counters.weight_changes += 1
        self.drop_prefixes()
        self.workspaces.on_weights_changed()

    def release(self) -> None:
        """End what runs and free the pool."""
        self.requests.end_all(EngineReleasedError("the engine was released"))
        self._speculation.release()
        self.workspaces.drop_all()

    def check(self) -> None:
        """Raise `InvariantError` if the books are inconsistent."""
        for workspace in self.workspaces:
            check_books(workspace.scheduler)

    def snapshot_books(self, max_blocks: int, max_requests: int) -> tuple[BooksSnapshot, ...]:
        """Who holds which block, in each workspace."""
        return tuple(snapshot(workspace.scheduler, max_blocks, max_requests) for workspace in self.workspaces)

    def _freshen(self, spec: RequestSpec) -> None:
        """Follow what happened to the model since the last call, before requests of a new one start."""
        if self._model_watch.sees_change(spec, is_idle=not self.live):
            self.on_weights_changed()
        workspace = self.prepare(spec)
        if self._config.packed_only and workspace.release_weights():
            self._model_watch.remember()

    def _add(self, spec: RequestSpec, handle: GenerationHandle, siblings: Sequence[GenerationHandle]) -> None:
        is_cached = spec.prefix_cache and self._config.prefix_caching
        root = root_key(self._epoch, spec.cache_salt, spec.adapter) if is_cached else None
        live = LiveRequest.of(spec, handle, root)
        parent = None if spec.fork_of is None else siblings[spec.fork_of].request_id
        self.requests.add(live, parent)
        self._speculation.add(live.request, spec, self._draft_model)

    def _draft_model(self, model: PreTrainedModel) -> DraftModel:
        """An engine for a model that guesses ahead, over as many tokens as this one's."""
        original_class = unpatched_class(model)
        blocks = self.workspaces.current.pool.num_blocks
        config = replace(self._config, num_blocks=blocks, tier="auto", attention_backend="auto", packed_only=False)
        fallbacks = self._counters.fallbacks
        stepper = Stepper(model, original_class, config, EngineCounters(), runs_ahead=False)
        return DraftModel(stepper, on_failure=lambda: fallbacks.update(["draft model failed"]))
