"""ModelWatch: whether the live model is still the one that everything was made from."""

from __future__ import annotations

from hfpaged.runtime.request_spec import RequestSpec
from hfpaged.runtime.weights_watch import WeightsWatch
from hfpaged.runtime.workspaces import Workspaces


class ModelWatch:
    """Looks at the model when requests come, once between two steps: whoever is admitted then had come before the look.

    Used by the stepping thread only.

    Args:
        watch_content: also look for changes of the weights that only their bytes show.
    """

    def __init__(self, workspaces: Workspaces, watch_content: bool):
        self._workspaces = workspaces
        self._watch_content = watch_content
        self._weights: WeightsWatch | None = None
        self._has_looked = False

    def on_step(self) -> None:
        """A step begins: the next request looks again."""
        self._has_looked = False

    def sees_change(self, spec: RequestSpec, is_idle: bool) -> bool:
        """Have the workspaces choose one for `spec`, and look whether the model changed since requests came last.

        Args:
            is_idle: nothing runs, so that there is time to read all weights.
        """
        looks, self._has_looked = not self._has_looked, True
        is_another = self._workspaces.choose(spec, looks)
        if not looks:
            return False
        if self._weights is None:
            self.remember()
            return False
        return self._weights.changed(self._workspaces.live_model(), look_at_content=is_idle) or is_another

    def remember(self) -> None:
        """The weights as they are now are the ones to compare with."""
        self._weights = WeightsWatch(self._workspaces.live_model(), watch_content=self._watch_content)
