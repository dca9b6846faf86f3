"""The thread-local state of PyTorch that changes what a forward computes, carried from a caller to the stepping thread.

Grad mode and inference mode do not change results: steps always run without gradients, outside inference mode, so that
nothing an engine keeps is an inference tensor. Autocast does change them: it is captured where a request is submitted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ThreadState:
    """Autocast as the caller has it. Requests whose states differ never share a step.

    Attributes:
        autocast_dtype: dtype that autocast computes in on the model's device; None when it is off.
        device_type: the device type it was asked for.
    """

    autocast_dtype: torch.dtype | None
    device_type: str

    @classmethod
    def capture(cls, device_type: str) -> ThreadState:
        """State of the calling thread for forwards on `device_type`."""
        enabled = torch.is_autocast_enabled(device_type)
        return cls(torch.get_autocast_dtype(device_type) if enabled else None, device_type)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run a forward as the captured thread would, without gradients."""
        enabled = self.autocast_dtype is not None
        with torch.inference_mode(False), torch.no_grad():
            # cache_enabled: autocast's cast weights would outlive a weight change within one `with` otherwise.
            with torch.autocast(self.device_type, self.autocast_dtype, enabled, cache_enabled=False):
                yield
