"""Workspaces: the pools, books and runners of one engine, and which of them takes new requests."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import asdict

from transformers import PreTrainedModel

from hfpaged.config import EngineConfig
from hfpaged.errors import EngineReleasedError
from hfpaged.runtime.request_spec import RequestSpec
from hfpaged.runtime.stats import EngineCounters
from hfpaged.runtime.view import EngineView
from hfpaged.runtime.workspace import Workspace


class Workspaces:
    """One for each kind of request: those that may not share a step never do.

    Requests differ in kind where their thread states differ, or where one began before the model changed and one after.
    For one thread, but for `current`, `len` and iteration, which others may look at.

    Args:
        model: is not kept alive.
        counters: keeps the totals of workspaces that are gone.

    Attributes:
        current: where new requests go; None before the first request and after a release.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        original_class: type[PreTrainedModel],
        counters: EngineCounters,
    ):
        self.current: Workspace | None = None
        self._all: list[Workspace] = []
        self._view = EngineView(model, original_class)
        self._model = weakref.ref(model)
        self._original_class = original_class
        self._counters = counters
        self._fuses = True

    def __iter__(self) -> Iterator[Workspace]:
        """All of them as they are now, however they change meanwhile."""
        return iter(list(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def live_model(self) -> PreTrainedModel:
        """The patched model.

        Raises:
            EngineReleasedError: it has been garbage collected.
        """
        model = self._model()
        if model is None:
            raise EngineReleasedError("the model of this engine is gone")
        return model

    def new_view(self) -> EngineView:
        """Another view of the patched model as it is now."""
        return EngineView(self.live_model(), self._original_class)

    def in_turn(self) -> Iterator[Workspace]:
        """All of them; the one that has waited longest for a step comes first, and is last the next time."""
        for workspace in list(self._all):
            self._all.append(self._all.pop(0))
            yield workspace

    def holding(self, request_id: int) -> Workspace:
        """The one that a request is in."""
        return next(workspace for workspace in self._all if request_id in workspace.scheduler.requests)

    def prepare(self, config: EngineConfig, spec: RequestSpec) -> Workspace:
        """Build the one for new requests if there is none yet, so that its capacity is known."""
        if self.current is None:
            self._view.refresh(self.live_model())
            mixes_adapters = spec.adapter is not None
            self.current = Workspace(self._view, config, spec.thread_state, mixes_adapters, self._fuses)
            self._all.append(self.current)
        return self.current

    def stop_fusing(self) -> None:
        """No workspace that is built from now on runs fused code."""
        self._fuses = False

    def choose(self, spec: RequestSpec, model_may_differ: bool = True) -> bool:
        """Make the one that suits a request the current one; None if it has to be built.

        The one before stays as long as it has requests.

        Args:
            model_may_differ: look at the whole model, which takes milliseconds; otherwise it is as it was last time.

        Returns:
            Whether the model is another one than before.
        """
        model = self.live_model()
        is_stale = model_may_differ and self._view.is_stale(model)
        if is_stale or (self.current is not None and not self.current.suits(spec)):
            if self.current is not None and not self.current.scheduler.requests:
                self.drop(self.current)
            fitting = (one for one in self._all if one.suits(spec) and not one.view.is_stale(model))
            self.current = next(fitting, None)
            self._view = self.new_view() if self.current is None else self.current.view
        return is_stale

    def drop_if_unused(self, workspace: Workspace) -> None:
        """Drop one that new requests do not go to, once its last one has ended."""
        if workspace is not self.current and not workspace.scheduler.requests:
            self.drop(workspace)

    def drop(self, workspace: Workspace) -> None:
        """Close one and free its pool."""
        self._counters.books.update(asdict(workspace.scheduler.counters))
        self._counters.ahead.captured_steps += workspace.tier.replayed_steps
        self._counters.ahead.shared_prefix_steps += workspace.backend.shared_prefix_steps
        workspace.close()
        self._all.remove(workspace)
        if workspace is self.current:
            self.current = None

    def drop_all(self) -> None:
        """Close all and free their pools."""
        for workspace in self:
            self.drop(workspace)

    def reset_prefix_caches(self) -> None:
        """Forget all cached prefixes; running requests go on."""
        for workspace in self._all:
            workspace.scheduler.reset_prefix_cache()

    def on_weights_changed(self) -> None:
        """Have the tiers follow the model's new weights."""
        model = self.live_model()
        for workspace in self._all:
            # One that is stale only finishes its requests; its shapes or dtypes may not be the weights' any more.
            if not workspace.view.is_stale(model):
                workspace.released.restore()
                workspace.tier.on_weights_changed()
