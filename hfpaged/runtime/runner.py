"""Runner: executes plans. A plan becomes block moves and one packed forward; out come the logits asked for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from hfpaged.core.plan import Plan
from hfpaged.errors import UnsupportedModelError
from hfpaged.runtime.attention.interface import AttentionBackend
from hfpaged.runtime.batch import BlockTables, StepBatch
from hfpaged.runtime.block_store import BlockStore
from hfpaged.runtime.kv_cache import KVCache
from hfpaged.runtime.step import SeenLayer
from hfpaged.runtime.thread_state import ThreadState
from hfpaged.runtime.view import EngineView


class Runner:
    """Runs the view of a model over a KV pool. Used by the stepping thread only.

    `run` is repeatable: until the books commit a plan, running it (or another one in its place) again gives the same
    logits, since a step only writes slots that no committed token uses.
    """

    def __init__(self, view: EngineView, backend: AttentionBackend, cache: KVCache, store: BlockStore, block_size: int):
        self.view = view
        self.backend = backend
        self.cache = cache
        self.store = store
        self.tables = BlockTables(block_size)
        self._slices_logits = view.model._supports_logits_to_keep()
        self._device = view.model.device
        view.step.bind(backend, cache.layers)

    def run(self, plan: Plan, state: ThreadState) -> torch.Tensor:
        """Execute stores, copies, loads, then the forward.

        Returns:
            [S, V] logits in the model's dtype, the rows `plan.entries` ask for (`logits_for`) in order.
        """
        self._move_blocks(plan)
        if not plan.entries:
            return torch.empty(0, 0)
        batch = self.tables.build(plan)
        self.backend.begin(batch)
        with state.applied():
            return self._forward(batch)

    def forget(self, request_id: int) -> None:
        """The request ended or lost its blocks: free what is kept for it."""
        self.tables.forget(request_id)
        self.store.complete(request_id)

    def _move_blocks(self, plan: Plan) -> None:
        for request_id, blocks in plan.stores:
            self.store.store(request_id, len(blocks), self.cache.read(blocks))
            self.tables.forget(request_id)
        if plan.copies:
            self.cache.copy(plan.copies)
        for request_id, blocks in plan.loads:
            self.cache.write(blocks, self.store.load(request_id))

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        rows = torch.from_numpy(batch.logit_rows).to(self._device)
        # Models cannot take an empty index; a step that samples nothing keeps one row and drops it below.
        keep = rows if len(rows) else torch.zeros(1, dtype=torch.long, device=self._device)
        arguments = {"logits_to_keep": keep} if self._slices_logits else {}
        output = self.view.model(
            input_ids=torch.from_numpy(batch.token_ids)[None].to(self._device),
            position_ids=torch.from_numpy(batch.positions)[None].to(self._device),
            use_cache=False,
            return_dict=True,
            **arguments,
        )
        logits = output.logits[0] if self._slices_logits else output.logits[0, keep]
        return logits[: len(rows)]


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


def takes_positions(model: torch.nn.Module) -> bool:
    """Whether the model's forward accepts explicit position ids, without which no batch can be packed."""
    return "position_ids" in inspect.signature(type(model).forward).parameters


def logit_counts(plan: Plan) -> Sequence[int]:
    """How many of the rows that `Runner.run` returns belong to each entry of the plan."""
    return [entry.logits_for for entry in plan.entries]
