"""Argument: where a module finds one of its arguments, by a call that was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hfpaged.program.description import NotRecognized
from hfpaged.program.trace import ModuleCall


@dataclass(frozen=True)
class Argument:
    """A place among the arguments of a module: an index of the positional ones, or a keyword."""

    place: int | str

    @classmethod
    def in_call(cls, call: ModuleCall, is_it: Callable[[Any], bool]) -> Argument:
        """The first argument of `call` that `is_it` says is the one.

        Raises:
            NotRecognized: none is.
        """
        for place, value in (*enumerate(call.args), *call.kwargs.items()):
            if is_it(value):
                return cls(place)
        raise NotRecognized(f"{call.name} is not given what it computes from")

    def of(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The argument of a call; None if it is left out."""
        if isinstance(self.place, str):
            return kwargs.get(self.place)
        return args[self.place] if self.place < len(args) else None
