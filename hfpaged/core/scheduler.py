"""Scheduler: the queues and what moves requests between them. Which tokens a step computes is the planner's work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hfpaged.core.block_pool import BlockPool
from hfpaged.core.counters import SchedulerCounters
from hfpaged.core.plan import UNKNOWN_TOKEN, Plan, PlannedRequest
from hfpaged.core.planner import Planner
from hfpaged.core.preemption import PreemptionPolicy
from hfpaged.core.prefix_cache import PrefixCache
from hfpaged.core.request import Request, RequestState
from hfpaged.core.request_queue import RequestQueue
from hfpaged.errors import InvariantError


@dataclass(frozen=True)
class SchedulerLimits:
    """Most tokens, and most requests, that one step computes."""

    max_batch_tokens: int
    max_requests: int


class Scheduler:
    """The books of an engine: its live requests, where each of them stands, and who holds which blocks.

    Use: `add` requests; then `plan`, run it, and `commit` or `abort` it; in between `finish`, `append_tokens`, ...
    Between `plan` and `commit` or `abort` nothing else may be called. A step costs time in proportion to the requests
    that it schedules, however many wait.

    A plan may be committed while its step still runs on a device: tokens that are not known then are `settle`d later,
    at the latest before the plan after the next.
    """

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, limits: SchedulerLimits, policy: PreemptionPolicy):
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.limits = limits
        self.policy = policy
        self.counters = SchedulerCounters()
        self.running = RequestQueue()
        self.waiting = RequestQueue()
        self.next_step = 0
        self._requests: dict[int, Request] = {}
        self._children: dict[int, list[Request]] = {}
        self._known_tables: set[int] = set()
        self._planner: Planner | None = None
        self._plan: Plan | None = None

    # ---- questions ----

    @property
    def requests(self) -> Mapping[int, Request]:
        """All live requests by id."""
        return self._requests

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the steps, those included that wait for a token from outside."""
        # The list is made in one go, so that statistics may be read while another thread steps.
        return len(self.running) + sum(request.state is RequestState.IDLE for request in list(self._requests.values()))

    @property
    def num_waiting(self) -> int:
        """Live requests that do not run."""
        return len(self._requests) - self.num_running

    def holders(self) -> Iterator[Request]:
        """Live requests that hold blocks."""
        return (request for request in self._requests.values() if request.blocks)

    def children_of(self, request: Request) -> tuple[int, ...]:
        """Ids of the requests that will be forked from `request` when its prompt is computed."""
        children = self._children.get(request.id)
        return tuple(child.id for child in children) if children else ()

    def knows_table(self, request: Request) -> bool:
        """Whether the runner was given this request's block table."""
        return request.id in self._known_tables

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether the keys and values of a request's first tokens are in its blocks."""
        return request.computed >= num_tokens and not request.swapped and bool(request.blocks)

    # ---- requests in and out ----

    def add(self, request: Request, fork_of: int | None = None) -> None:
        """Queue a request.

        Args:
            fork_of: id of a request with the same tokens. If it is live and still computes them, this one waits
                beside it and then shares all its blocks, and its next logits.

        Raises:
            RequestTooLargeError: it could not run even alone.
        """
        self.pool.require_room(request.max_tokens)
        self._requests[request.id] = request
        parent = self._requests.get(fork_of) if fork_of is not None else None
        if parent is not None and self._can_wait_for(parent, request):
            request.state = RequestState.FORKING
            self._children.setdefault(parent.id, []).append(request)
        else:
            self._enqueue(request)

    @staticmethod
    def _can_wait_for(parent: Request, child: Request) -> bool:
        """Whether the next logits of `parent` will be those that `child` needs."""
        # An idle one has had its logits, even if it lost its blocks since; a forking one gets its parent's.
        is_computing = parent.state in (RequestState.WAITING, RequestState.PARKED, RequestState.RUNNING)
        settled = parent.draft_tokens == 0 and parent.pending == 0
        return is_computing and settled and parent.tokens == child.tokens

    def fork(self, parent_id: int, child: Request) -> None:
        """Add `child`, a copy of an idle request: it shares all the parent's blocks, and waits for its own token."""
        parent = self._requests[parent_id]
        if parent.state is not RequestState.IDLE:
            raise InvariantError(f"request {parent_id} is forked while it is {parent.state.value}")
        self._requests[child.id] = child
        child.state = RequestState.IDLE
        self._share_blocks(parent, child)

    def append_tokens(self, request_id: int, tokens: list[int], logits_for: int = 1) -> None:
        """Give an idle request its next tokens; the last `logits_for` of them get logits when they are computed."""
        request = self._requests[request_id]
        if request.state is not RequestState.IDLE:
            raise InvariantError(f"request {request_id} is given tokens while it is {request.state.value}")
        request.tokens += tokens
        request.draft_tokens = logits_for - 1
        self.counters.generated_tokens += len(tokens)
        self._wake(request)

    def append_drafts(self, request_id: int, tokens: list[int]) -> None:
        """Let a running request compute guesses behind its last token in the same step. They get logits, too."""
        request = self._requests[request_id]
        if request.state is RequestState.RUNNING:
            request.tokens += tokens
            request.draft_tokens = len(tokens)
            self.counters.generated_tokens += len(tokens)

    def rollback(self, request_id: int, count: int) -> None:
        """Forget the last `count` tokens of an idle request, and the blocks that only they were in."""
        request = self._requests[request_id]
        self._drop_tokens(request, count)

    def finish(self, request_id: int) -> None:
        """Take a request out, wherever it is, and free what it holds. Also how one is cancelled."""
        request = self._requests.pop(request_id)
        self._remove_from_queue(request)
        request.state = RequestState.FINISHED
        self._known_tables.discard(request_id)
        self._free_blocks(request)
        self._enqueue_all(self.prefix_cache.abandon(request))
        self._promote_children(request)

    # ---- steps ----

    def plan(self) -> Plan | None:
        """What the next step does, or None if nothing can be computed. Changes nothing."""
        if self._plan is not None:
            raise InvariantError("plan() while a plan is out; commit or abort it first")
        planner = Planner(self)
        plan = planner.plan()
        if plan is not None:
            self._plan, self._planner = plan, planner
        return plan

    def abort(self, plan: Plan) -> None:
        """The plan failed, perhaps half executed: forget it. Every request is as before, but for what it may have cost.

        Blocks that the plan wanted to give to others may have been written: requests that held them compute them
        again, and cached content in them is forgotten.
        """
        planner = self._take_planner(plan)
        for request in planner.victims:
            self._free_blocks(request)
            self._evict(request, swapped=False)
        for block in planner.draft.taken:
            self.pool.forget(block)
        # The runner may have changed its tables as the plan said: it is given whole ones again.
        self._known_tables.difference_update(entry.id for entry in plan.entries)

    def commit(self, plan: Plan, sampled: Mapping[int, int | None], accepted: Mapping[int, int] | None = None) -> None:
        """The plan was executed.

        Args:
            sampled: next token of each request in the entries' `samples`; None leaves the request idle; UNKNOWN_TOKEN
                lets it run on to wherever its length allows, until `settle` says what was drawn.
            accepted: of requests with draft tokens, how many of them stand; the others are forgotten.
        """
        planner = self._take_planner(plan)
        self.next_step += 1
        self.pool.apply(planner.draft)
        self.counters.block_copies += len(plan.copies)
        for request, swapped in planner.victims.items():
            self._evict(request, swapped)
        for request, shared in planner.admitted.items():
            self._enter(request, shared)
        for request_id, blocks in plan.loads:
            self._requests[request_id].blocks = list(blocks)
            self._requests[request_id].swapped = False
        for entry in plan.entries:
            self._advance(entry)
        for request, pending in planner.parked.items():
            if self.prefix_cache.park(request, pending):
                self._remove_from_queue(request)
                request.state = RequestState.PARKED
        for entry in plan.entries:
            if entry.samples:
                self._catch_up(entry, sampled, accepted or {})

    def settle(self, request_id: int, token: int) -> None:
        """Say what the oldest of the request's unknown tokens is."""
        request = self._requests[request_id]
        if request.pending == 0:
            raise InvariantError(f"request {request_id} has no token to settle")
        request.pending -= 1
        request.tokens.append(token)
        self.counters.generated_tokens += 1
        # One that lost its blocks meanwhile publishes them when it has them again.
        if request.blocks:
            self._enqueue_all(self.prefix_cache.publish(request))

    def reject_drafts(self, request_id: int, count: int) -> None:
        """Forget the last `count` tokens of an idle request: drafts that a commit let stand but that were not drawn."""
        self.rollback(request_id, count)
        self.counters.accepted_tokens -= count
        self.counters.generated_tokens -= count

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. What live requests have computed so far stays out of the cache for good."""
        self.prefix_cache.reset()
        for request in list(self._requests.values()):
            if request.computed or request.blocks:
                self._enqueue_all(self.prefix_cache.abandon(request))
                request.cache_root = None

    # ---- commit, in parts ----

    def _take_planner(self, plan: Plan) -> Planner:
        if plan is not self._plan:
            raise InvariantError("this is not the plan that was handed out last")
        planner, self._plan, self._planner = self._planner, None, None
        return planner

    def _evict(self, request: Request, swapped: bool) -> None:
        request.blocks = []
        request.swapped = swapped
        request.published = 0
        if swapped:
            self.counters.preemptions_swap += 1
        else:
            self.counters.preemptions_recompute += 1
            request.computed = 0
        self._known_tables.discard(request.id)
        self._enqueue_all(self.prefix_cache.abandon(request))
        if request.state is RequestState.RUNNING:
            self._remove_from_queue(request)
            self._enqueue(request)

    def _enter(self, request: Request, shared: list[int]) -> None:
        self._remove_from_queue(request)
        request.state = RequestState.RUNNING
        self.running.add(request)
        if request.swapped:
            # Its blocks come back under new ids; they are entered in the cache again, first writer wins.
            return
        if shared:
            request.blocks = list(shared)
            request.computed = len(shared) * self.pool.block_size
            request.published = len(shared)
        if not request.admitted:
            request.admitted = True
            self.counters.prompt_tokens += request.prompt_len
            self.counters.cached_prompt_tokens += request.computed
        self.prefix_cache.claim(request)

    def _advance(self, entry: PlannedRequest) -> None:
        request = self._requests[entry.id]
        if entry.new_blocks:
            request.blocks[entry.first_new_index :] = entry.new_blocks
            # A block that replaces a shared one is not the cached block any more.
            request.published = min(request.published, entry.first_new_index)
        if entry.full_table is not None:
            self._known_tables.add(entry.id)
        request.computed = entry.start + entry.num_tokens
        if request.score_from is not None:
            request.on_scored(request.computed)
        # Most steps of a request that decodes fill no block.
        if request.computed >= (request.published + 1) * self.pool.block_size:
            self._enqueue_all(self.prefix_cache.publish(request))

    def _catch_up(self, entry: PlannedRequest, sampled: Mapping[int, int | None], accepted: Mapping[int, int]) -> None:
        request = self._requests[entry.id]
        if request.draft_tokens:
            self._judge_drafts(request, accepted.get(entry.id, request.draft_tokens))
        for child in self._children.pop(request.id, ()) if self._children else ():
            self._share_blocks(request, child)
            child.state, child.admitted = RequestState.IDLE, True
            self.counters.prompt_tokens += child.prompt_len
            self.counters.cached_prompt_tokens += child.prompt_len
            self._append_sampled(child, sampled[child.id])
        self._append_sampled(request, sampled[request.id])

    def _judge_drafts(self, request: Request, stands: int) -> None:
        rejected = request.draft_tokens - stands
        self.counters.draft_tokens += request.draft_tokens
        self.counters.accepted_tokens += stands
        request.draft_tokens = 0
        if rejected:
            self._drop_tokens(request, rejected)
            self.counters.generated_tokens -= rejected

    def _append_sampled(self, request: Request, token: int | None) -> None:
        """Append a drawn token and run on; without one, or at the end of an unknown text, wait."""
        if token == UNKNOWN_TOKEN:
            request.pending += 1
        elif token is not None:
            request.tokens.append(token)
            self.counters.generated_tokens += 1
        if token is None or (token == UNKNOWN_TOKEN and request.length >= request.max_tokens):
            self._remove_from_queue(request)
            request.state = RequestState.IDLE
        elif request.state is not RequestState.RUNNING:
            self._wake(request)

    # ---- queues ----

    def _enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        self.waiting.add(request)

    def _enqueue_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._enqueue(request)

    def _wake(self, request: Request) -> None:
        """An idle request has tokens to compute again: it runs on if it kept its blocks and there is a slot."""
        if request.blocks and len(self.running) < self.limits.max_requests:
            request.state = RequestState.RUNNING
            self.running.add(request)
        else:
            self._enqueue(request)

    def _remove_from_queue(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        elif request.state is RequestState.RUNNING:
            self.running.remove(request)
        elif request.state is RequestState.PARKED:
            self.prefix_cache.unpark(request)
        elif request.state is RequestState.FORKING:
            siblings = next(children for children in self._children.values() if request in children)
            siblings.remove(request)

    def _promote_children(self, parent: Request) -> None:
        """The first child of a parent that left early becomes an ordinary request, and the others' parent."""
        children = self._children.pop(parent.id, [])
        if children:
            heir, *others = children
            self._enqueue(heir)
            if others:
                self._children[heir.id] = others

    # ---- blocks ----

    def _share_blocks(self, parent: Request, child: Request) -> None:
        for block in parent.blocks:
            self.pool.add_reference(block)
        child.cache_root = parent.cache_root
        child.blocks = list(parent.blocks)
        child.computed = parent.computed if parent.blocks else 0
        child.published = parent.published

    def _free_blocks(self, request: Request) -> None:
        self.pool.free(reversed(request.blocks))
        request.blocks = []

    def _drop_tokens(self, request: Request, count: int) -> None:
        request.drop_last_tokens(count, self.pool.block_size)
        keep = self.pool.blocks_for(request.computed)
        if not request.swapped:
            self.pool.free(reversed(request.blocks[keep:]))
            del request.blocks[keep:]
        request.published = min(request.published, len(request.tokens) // self.pool.block_size)
