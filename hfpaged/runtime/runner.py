"""Runner: executes plans. A plan becomes block moves and one packed forward; out come the logits asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hfpaged.core.plan import Plan
from hfpaged.errors import UnsupportedModelError
from hfpaged.runtime.batch import BlockTables
from hfpaged.runtime.block_store import BlockStore
from hfpaged.runtime.kv_cache import KVCache
from hfpaged.runtime.paged_attention import SeenLayer
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.runtime.tier import StepOutput, Tier
from hfpaged.runtime.view import EngineView
from hfpaged.sampling.draw_table import NO_DRAWS, DrawTable


class Runner:
    """Runs one tier over a KV pool. Used by the stepping thread only.

    `run` is repeatable: a step only writes slots that no committed token uses.
    """

    def __init__(self, tier: Tier, cache: KVCache, store: BlockStore, block_size: int):
        self._tier = tier
        self._mover = cache.mover
        self._store = store
        self._tables = BlockTables(block_size, padding_block=cache.num_blocks)
        self._drawn_at: dict[int, int] = {}

    def run(self, plan: Plan, want_logits: bool, draws: DrawTable = NO_DRAWS) -> StepOutput:
        """Execute stores, copies, loads, then the forward.

        Args:
            want_logits: whether logits are needed; without it a tier that can may give their argmax alone.
            draws: what a tier that works ahead of the host draws itself.

        Returns:
            The rows that `plan.entries` ask for (`logits_for`), in order.
        """
        self._move_blocks(plan)
        if not plan.entries:
            return StepOutput(torch.empty(0, 0), None)
        return self._tier.run(self._tables.build(plan, self._drawn_at, draws), want_logits)

    def switch_to(self, tier: Tier) -> None:
        """Run the forwards of further steps by another tier, over the same pool."""
        self._tier = tier

    def recompute(self, plan: Plan, tier: Tier) -> StepOutput:
        """The forward of the step that `run` has just run once more, by `tier`, with logits."""
        return tier.run(self._tables.build(plan, self._drawn_at), True)

    def commit(self, plan: Plan, drawn: Sequence[int] = ()) -> None:
        """The books took the plan over: drop what it made superfluous.

        Args:
            drawn: ids of the requests whose tokens the tier was fed back, in order.
        """
        self._drawn_at = {request_id: index for index, request_id in enumerate(drawn)}
        for request_id in plan.recomputed:
            self._tables.forget(request_id)
        for request_id, _ in plan.loads:
            self._store.complete(request_id)

    def abort(self, plan: Plan) -> None:
        """The plan failed: whoever lost blocks to it computes them again."""
        for request_id in (*plan.recomputed, *(request_id for request_id, _ in plan.stores)):
            self.forget(request_id)

    def forget(self, request_id: int) -> None:
        """The request ended: free what is kept for it."""
        self._tables.forget(request_id)
        self._store.complete(request_id)

    def _move_blocks(self, plan: Plan) -> None:
        for request_id, blocks in plan.stores:
            self._store.store(request_id, len(blocks), self._mover.read(blocks))
            self._tables.forget(request_id)
        if plan.copies:
            self._mover.copy(plan.copies)
        for request_id, blocks in plan.loads:
            self._mover.write(blocks, self._store.load(request_id))


def probe_layers(view: EngineView, state: ThreadState) -> list[SeenLayer]:
    """Run one token through the view to learn which modules attend, with what shapes and dtype.

    Raises:
        UnsupportedModelError: nothing attended through the interface, or layers disagree on the dtype.
    """
    model = view.model
    view.step.unbind()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with state.applied():
        model(input_ids=token, position_ids=token.clone(), use_cache=False, return_dict=True)
    seen = view.step.seen
    if not seen:
        raise UnsupportedModelError(["none of its layers calls Transformers' attention interface"])
    if len({layer.dtype for layer in seen}) > 1:
        raise UnsupportedModelError(["its layers compute attention in different dtypes"])
    return seen
