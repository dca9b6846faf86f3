"""CoreSettings: what the engine's process is told when it starts, as one line of JSON on its standard input."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from hfpaged.serving.process.transport import Addresses


class CoreSettings(Struct, frozen=True):
    """How to load the model, and where the client is.

    Attributes:
        model: directory or hub id; None: the default model.
        dtype: name of a torch dtype, or "auto".
        threads: CPU threads; None: torch's choice.
        engine_options: fields of `EngineConfig`.
        parent: process id of the client.
        cpus: CPUs to stay on; None: all that the client may use.
    """

    model: str | None
    addresses: Addresses
    parent: int
    dtype: str = "auto"
    threads: int | None = None
    engine_options: dict[str, Any] = {}
    cpus: list[int] | None = None

    def to_line(self) -> bytes:
        """One line of JSON."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> CoreSettings:
        """The settings that `to_line` wrote."""
        return msgspec.json.decode(line, type=cls)
