"""The one way to what an engine keeps to itself, for tests that look at its books, its pool or its tier."""

from __future__ import annotations

from hfpaged.generation.engine import Engine
from hfpaged.runtime.workspace import Workspace


def workspace_of(engine: Engine) -> Workspace:
    """Where new requests of an engine go. It has had a request."""
    return engine._stepper.workspaces.current
