"""PreemptionPolicy: whether a request that gives its blocks back is swapped out or computed again later."""

from __future__ import annotations

from collections.abc import Callable

from hfpaged.core.request import Request


class PreemptionPolicy:
    """Decides by option, by room in the store, and by cost.

    Args:
        choice: "swap", "recompute" or "auto", whichever is cheaper.
        compute_cost_per_token, swap_cost_per_block: in any one unit; a swap moves each block out and in again.
        can_store: whether the block store has room for so many blocks.
    """

    def __init__(
        self,
        choice: str,
        compute_cost_per_token: float,
        swap_cost_per_block: float,
        can_store: Callable[[int], bool],
    ):
        self.choice = choice
        self.compute_cost_per_token = compute_cost_per_token
        self.swap_cost_per_block = swap_cost_per_block
        self._can_store = can_store

    def should_swap(self, request: Request, blocks_already_stored: int) -> bool:
        """Whether to swap `request` out; otherwise it is recomputed.

        Args:
            blocks_already_stored: blocks that the same plan moves to the store before.
        """
        if self.choice == "recompute" or request.computed == 0:
            return False
        if not self._can_store(blocks_already_stored + len(request.blocks)):
            return False
        if self.choice == "swap":
            return True
        swap = 2 * len(request.blocks) * self.swap_cost_per_block
        return swap < request.computed * self.compute_cost_per_token
