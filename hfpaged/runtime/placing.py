"""Putting forwards in the place of those of modules, and taking them away again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

Forward = Callable[..., Any]


class Place(NamedTuple):
    """Where a forward is: the attributes of its module, and those of them that it took the place of."""

    attributes: dict[str, Any]
    forward: Forward
    before: dict[str, Forward]


def put_in_place(forwards: Mapping[nn.Module, Forward]) -> list[Place]:
    """Have modules run these. A forward that a module has of its own comes back with `take_away`."""
    places = []
    for module, forward in forwards.items():
        attributes = vars(module)
        before = {name: attributes[name] for name in ("forward",) if name in attributes}
        places.append(Place(attributes, forward, before))
        attributes["forward"] = forward
    return places


def take_away(places: Iterable[Place]) -> None:
    """Undo `put_in_place`, except where another forward has taken the place since."""
    for attributes, forward, before in places:
        if attributes.get("forward") is forward:
            del attributes["forward"]
            attributes.update(before)
