"""Sentinel: notices that fused code computes garbage, by looking at logits and at the first tokens of requests.

A wrong fusion rarely raises: it gives numbers that are not finite, whose argmax is token 0, or a model that says one
token for ever. Such a step is computed once more by the model's own modules, over the same keys and values.

Where steps run ahead of the host, the device says with the tokens whether the logits were finite, and both are read
before the tokens enter the books. The step behind has been launched by then, and has changed what a repetition of the
suspected one would read: the modules compute the suspected text from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hfpaged.core.plan import Plan, PlannedRequest
from hfpaged.core.request import Request
from hfpaged.errors import CorruptOutputError
from hfpaged.runtime.device.ahead_tier import AheadTier
from hfpaged.runtime.device.launched_step import LaunchedStep
from hfpaged.runtime.drawing import Outcome
from hfpaged.runtime.live_request import LiveRequest
from hfpaged.runtime.module_tier import ModuleTier
from hfpaged.runtime.stats import EngineCounters
from hfpaged.runtime.tier import StepOutput
from hfpaged.runtime.view import EngineView
from hfpaged.runtime.workspace import Workspace

# Tokens, from the very first on, that are one and the same before that is suspicious.
REPEATS = 8
# How far the logit of a token may lie below the largest, relative to the spread of all, before the token is wrong:
# rounding decides between closer ones.
_NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class FusionsDisagree(Exception):
    """Fused and plain code give different tokens for the same step."""


@dataclass(frozen=True)
class Suspect:
    """A row of a step's output that needs a second opinion.

    Attributes:
        row: its index.
        token: what the step says; None: its logits are not finite.
    """

    row: int
    token: int | None


class Sentinel:
    """Watches the steps of one engine.

    Args:
        make_view: a fresh view of the live model, without any fusion.
    """

    def __init__(self, make_view: Callable[[], EngineView], counters: EngineCounters):
        self._make_view = make_view
        self._counters = counters
        self._plain: WeakKeyDictionary[Workspace, tuple[EngineView, ModuleTier | AheadTier]] = WeakKeyDictionary()

    def plain_tier(self, workspace: Workspace) -> tuple[EngineView, ModuleTier | AheadTier]:
        """The model's own modules over the keys and values of a workspace."""
        if workspace not in self._plain:
            view = self._make_view()
            self._plain[workspace] = view, workspace.plain_tier(view)
        return self._plain[workspace]

    def check_numbers(self, workspace: Workspace, plan: Plan, output: StepOutput) -> None:
        """Have the step computed again if some of its logits are not finite.

        Raises:
            CorruptOutputError, FusionsDisagree: as `compare`.
        """
        if output.logits is None and output.argmax is not None:
            # The argmax of numbers that are none is 0. Only the logits tell it from a text that has token 0.
            zeros = [Suspect(row, 0) for row, token in enumerate(output.argmax.tolist()) if token == 0]
            if not zeros:
                return
            plan, _ = _only(plan, zeros)
            output = workspace.runner.recompute(plan, workspace.tier)
        plan, suspects = _only(plan, [Suspect(row, None) for row in _corrupt_rows(output)])
        self._ask(workspace, [plan], suspects)

    def check_tokens(
        self, workspace: Workspace, plan: Plan, live: Mapping[int, LiveRequest], outcomes: Sequence[Outcome]
    ) -> None:
        """Have the step computed again if it brings a request its eighth token that is the same since it began.

        Raises:
            CorruptOutputError, FusionsDisagree: as `compare`.
        """
        tokens = {id(outcome.live): outcome.tokens for outcome in outcomes}
        suspects = []
        for rows, request_id in plan.sampled_rows():
            one = live[request_id]
            if len(rows) == 1 and _repeats_itself(one, tokens.get(id(one), [])):
                suspects.append(Suspect(rows.start, tokens[id(one)][-1]))
        plan, suspects = _only(plan, suspects)
        self._ask(workspace, [plan], suspects)

    def check_launched(self, workspace: Workspace, step: LaunchedStep, live: Mapping[int, LiveRequest]) -> None:
        """Both checks, for a step that a device computes and whose tokens have not entered the books. Waits for it.

        Raises:
            CorruptOutputError, FusionsDisagree: as `compare`.
        """
        step.mark.synchronize()
        suspects = list(_suspects_of_launched(step, live))
        if not suspects:
            return
        for later in workspace.in_flight:
            later.mark.synchronize()
        for one, entry, suspect in suspects:
            if workspace.scheduler.holds(one.request, entry.start + entry.num_tokens):
                most = workspace.scheduler.limits.max_batch_tokens
                self._ask(workspace, _from_the_beginning(one.request, entry, most), [suspect])
            elif suspect.token is None:
                # Its blocks are gone. Computed again without fusions, it shows whose fault it is.
                raise FusionsDisagree

    def _ask(self, workspace: Workspace, plans: Sequence[Plan], suspects: Sequence[Suspect]) -> None:
        """Have plans computed in a row, the last of which has the suspects among its rows."""
        if not suspects or workspace.adapters is not None:
            # Adapters of single rows are in the way of fusions, and not in a plain view.
            return
        self._counters.sentinel_checks += 1
        view, tier = self.plain_tier(workspace)

        def recompute() -> StepOutput:
            return [workspace.runner.recompute(plan, tier) for plan in plans][-1]

        def locate() -> str:
            with first_corrupt_module(view.model) as found:
                recompute()
            return found[0] if found else "the model"

        compare(suspects, recompute(), locate)


def compare(suspects: Sequence[Suspect], plain: StepOutput, locate: Callable[[], str]) -> None:
    """Judge suspects by the plain output of the same step. Returns if it says the same.

    Args:
        locate: names the module whose output is the first that is not finite.

    Raises:
        CorruptOutputError: the plain code's output is not finite either.
        FusionsDisagree: it is another one.
    """
    logits = plain.logits.float()
    slack = _NEAR_TIE.get(plain.logits.dtype, 0.0)
    for suspect in suspects:
        row = logits[suspect.row]
        if not torch.isfinite(row.amax()):
            raise CorruptOutputError(locate())
        if suspect.token is None or row.amax() - row[suspect.token] > slack * row.std():
            raise FusionsDisagree


@contextmanager
def first_corrupt_module(model: nn.Module) -> Iterator[list[str]]:
    """Collects the names of modules of `model` whose output is not finite, in the order they return."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, (tuple, list)) else (output,)
            tensors = (part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point())
            if any(not bool(torch.isfinite(tensor).all()) for tensor in tensors):
                found.append(name or "the model")

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _corrupt_rows(output: StepOutput) -> list[int]:
    if output.logits is None or not len(output.logits):
        return []
    # The largest is NaN where any is, and infinite where one is too large or all are masked.
    return torch.nonzero(~torch.isfinite(output.logits.amax(-1).float())).flatten().tolist()


def _only(plan: Plan, suspects: Sequence[Suspect]) -> tuple[Plan, list[Suspect]]:
    """The part of a step that computes suspects, which are a few of many rows, and they by its rows."""
    entries, moved = [], []
    first = rows_before = 0
    for entry in plan.entries:
        rows = range(first, first + entry.logits_for)
        found = [Suspect(one.row - first + rows_before, one.token) for one in suspects if one.row in rows]
        if found:
            entries.append(entry)
            moved += found
            rows_before += len(rows)
        first = rows.stop
    return Plan(plan.step, tuple(entries)), moved


def _suspects_of_launched(
    step: LaunchedStep, live: Mapping[int, LiveRequest]
) -> Iterator[tuple[LiveRequest, PlannedRequest, Suspect]]:
    """Requests that are still there, with their part of the step and the row of it that is suspicious."""
    finite = None if step.finite is None else step.finite.tolist()
    drawn = {} if step.tokens is None else dict(zip(map(id, step.requests), step.tokens.tolist(), strict=False))
    first = 0
    for entry in step.plan.entries:
        rows = range(first, first + entry.logits_for)
        first = rows.stop
        corrupt = [] if finite is None else [row for row in rows if not finite[row]]
        for request_id in set(entry.samples or (entry.id,)) & set(live):
            one = live[request_id]
            if corrupt:
                yield one, entry, Suspect(corrupt[0] - rows.start, None)
            elif id(one) in drawn and _repeats_itself(one, [drawn[id(one)]]):
                yield one, entry, Suspect(len(rows) - 1, drawn[id(one)])


def _from_the_beginning(request: Request, entry: PlannedRequest, most_tokens: int) -> list[Plan]:
    """Steps that compute a request up to the end of an entry, in the blocks that it has, with the entry's logits."""
    end = entry.start + entry.num_tokens
    last = max(0, end - max(most_tokens, entry.num_tokens))
    starts = [*range(0, last, most_tokens), last]
    plans = []
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        part = PlannedRequest(
            request.id,
            start,
            stop - start,
            tuple(request.tokens[start:stop]),
            full_table=tuple(request.blocks),
            first_new_index=0,
            new_blocks=(),
            logits_for=entry.logits_for if stop == end else 0,
            samples=(),
        )
        plans.append(Plan(0, (part,)))
    return plans


def _repeats_itself(live: LiveRequest, drawn: Sequence[int]) -> bool:
    request = live.request
    generated = [*request.tokens[request.prompt_len :], *drawn]
    if request.draft_tokens or not drawn or not len(generated) - len(drawn) < REPEATS <= len(generated):
        return False
    return len(set(generated[:REPEATS])) == 1
