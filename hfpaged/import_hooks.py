"""when_imported: have a function called as soon as some module is there, without importing it."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Listener = Callable[[ModuleType], object]


def when_imported(name: str, listener: Listener) -> None:
    """Call `listener` with the module `name`: now if it has been imported, else when it first is.

    It is called on the thread that imports, once the module is complete and before the import returns. What it raises
    is raised by the import. A module whose import fails is not there; the next attempt counts.
    """
    finder = _Announcer(name, listener)
    # First the finder, then the look: another thread may be about to import the module.
    sys.meta_path.insert(0, finder)
    if sys.modules.get(name) is not None:
        # Waits for a thread that is in the middle of importing it.
        finder.announce(importlib.import_module(name))


class _Announcer(MetaPathFinder):
    """Finds one module as the finders behind it do, tells the listener of its first import, and is gone."""

    def __init__(self, name: str, listener: Listener):
        self._name = name
        self._listener: Listener | None = listener

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._listener is None:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in self._finders_behind())
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _AnnouncingLoader(spec.loader, self)
        return spec

    def _finders_behind(self) -> Iterator[MetaPathFinder]:
        finders = itertools.dropwhile(lambda finder: finder is not self, sys.meta_path)
        return (finder for finder in itertools.islice(finders, 1, None) if hasattr(finder, "find_spec"))

    def announce(self, module: ModuleType) -> None:
        """Tell the listener, the first time only."""
        listener, self._listener = self._listener, None
        # A new list, because another thread may be going through the old one.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
        if listener is not None:
            listener(module)


class _AnnouncingLoader(Loader):
    """Loads a module by its own loader, which it leaves on the module, and announces it."""

    def __init__(self, loader: Loader, announcer: _Announcer):
        self._loader = loader
        self._announcer = announcer

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._announcer.announce(module)

    def __getattr__(self, name: str) -> Any:
        """Whatever else a loader can be asked for, such as sources."""
        return getattr(self._loader, name)
