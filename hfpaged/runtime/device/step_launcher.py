"""StepLauncher: which tokens of a step the device draws, and what is queued behind its forward for the host to read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfpaged.core.plan import Plan
from hfpaged.runtime.device.accelerator import Accelerator
from hfpaged.runtime.device.launched_step import LaunchedStep, StepDraws
from hfpaged.runtime.live_request import LiveRequest
from hfpaged.runtime.tier import StepOutput
from hfpaged.sampling.draw_table import Draw, DrawTable


class StepLauncher:
    """Says what of a step the device draws, and queues the copies for the host behind it.

    Args:
        most_drawn: tokens that can be drawn in one step; the host draws any further ones.
    """

    def __init__(self, accelerator: Accelerator, most_drawn: int):
        self._accelerator = accelerator
        self._most_drawn = most_drawn

    def prepare(self, plan: Plan, live: Mapping[int, LiveRequest]) -> StepDraws:
        """What the device will draw in a step that is about to be queued."""
        requests: list[tuple[LiveRequest, range]] = []
        verified: list[tuple[LiveRequest, range]] = []
        count = 0
        for rows, request_id in plan.sampled_rows():
            one = live[request_id]
            if one.spec.steered or one.draw is None or count + len(rows) > self._most_drawn:
                continue
            (verified if one.spec.may_speculate else requests).append((one, rows))
            count += len(rows)
        return StepDraws(
            [one for one, _ in requests],
            [(one, len(rows)) for one, rows in verified],
            DrawTable.of([draw for one, rows in (*requests, *verified) for draw in _draws(one, rows)]),
        )

    def launch(
        self, plan: Plan, live: Mapping[int, LiveRequest], draws: StepDraws, output: StepOutput, watch: bool = False
    ) -> LaunchedStep:
        """Queue what follows a step whose forward and draws have been queued.

        Args:
            watch: have the device see whether the logits are finite.
        """
        drawn_here = draws.ids
        steered, on_host = [], []
        with torch.no_grad(), self._accelerator.active():
            for rows, request_id in plan.sampled_rows():
                one, logits = live[request_id], output.logits
                if one.spec.steered:
                    steered.append((one, logits[rows.start : rows.stop].to(torch.float32, copy=True)))
                elif request_id not in drawn_here:
                    on_host.append((one, logits[rows.start : rows.stop].clone()))
            scored = {entry.id: live[entry.id] for entry in plan.entries if entry.scored}
            return LaunchedStep(
                plan=plan,
                accelerator=self._accelerator,
                draws=draws,
                drawn=output.drawn[: len(draws.requests)] if drawn_here else None,
                tokens=self._to_host(output.drawn) if drawn_here else None,
                finite=self._to_host(_are_finite(output)) if watch and len(output.argmax) else None,
                on_host=on_host,
                steered=steered,
                scored=scored,
                scored_output=StepOutput(output.logits.clone(), None) if scored else None,
                # Behind everything above.
                mark=self._accelerator.mark(),
            )

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a tensor [n] to page-locked memory, which is returned."""
        copied = self._accelerator.pinned(len(tensor), tensor.dtype)
        self._accelerator.download(tensor, copied)
        return copied


def _are_finite(output: StepOutput) -> torch.Tensor:
    """bool [S]: whether all logits of a row are finite."""
    # The largest is NaN where any is, and infinite where one is too large or all are masked.
    return torch.isfinite(output.logits.gather(1, output.argmax[:, None])[:, 0])


def _draws(live: LiveRequest, rows: range) -> list[Draw]:
    """A draw from each of a request's rows of logits: behind its guesses, if it has any, each at its own position."""
    first = live.request.length - len(rows) + 1
    return [Draw(row, live.draw, live.row, first + index) for index, row in enumerate(rows)]
