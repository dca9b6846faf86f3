"""`when_imported`, on modules made for it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import pytest

from hfpaged.import_hooks import when_imported

_numbers = itertools.count()


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that nobody has imported, and gives its name."""
    monkeypatch.syspath_prepend(tmp_path)
    finders, names = sys.meta_path, []

    def make(source: str) -> str:
        names.append(f"module_to_come_{next(_numbers)}")
        (tmp_path / f"{names[-1]}.py").write_text(source)
        importlib.invalidate_caches()
        return names[-1]

    yield make
    sys.meta_path = finders
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def heard() -> list[ModuleType]:
    return []


def test_is_called_once_with_the_complete_module_and_leaves_no_trace(make_module, heard):
    before = list(sys.meta_path)
    name = make_module("early = 1\nimport json\nlate = 2\n")
    when_imported(name, lambda module: heard.append(module) or setattr(module, "late", module.late + 1))
    assert name not in sys.modules and not heard
    module = importlib.import_module(name)
    assert heard == [module] and module.late == 3
    assert sys.meta_path == before
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert importlib.reload(module) is module and heard == [module]


def test_is_called_at_once_for_a_module_that_is_there(heard):
    before = list(sys.meta_path)
    when_imported("json", heard.append)
    assert heard == [sys.modules["json"]] and sys.meta_path == before


def test_several_listeners_are_all_called(make_module, heard):
    name = make_module("")
    when_imported(name, heard.append)
    when_imported(name, heard.append)
    module = importlib.import_module(name)
    assert heard == [module, module]


def test_the_module_can_be_found_and_read_without_being_imported(make_module, heard):
    name = make_module("number = 5\n")
    when_imported(name, heard.append)
    spec = importlib.util.find_spec(name)
    assert spec.origin.endswith(f"{name}.py") and spec.loader.get_source(name) == "number = 5\n"
    assert not heard and name not in sys.modules
    assert importlib.util.find_spec(f"{name}_that_is_not_there") is None


def test_an_import_that_fails_is_not_one(make_module, heard):
    name = make_module("import sys\nif not hasattr(sys, '_may_import'): raise OSError('not yet')\n")
    when_imported(name, heard.append)
    with pytest.raises(OSError, match="not yet"):
        importlib.import_module(name)
    assert not heard and name not in sys.modules
    sys._may_import = True
    try:
        assert heard == [] and [importlib.import_module(name)] == heard
    finally:
        del sys._may_import


class Asking(MetaPathFinder):
    """Asks everybody else first, as other libraries' hooks do."""

    def __init__(self, name: str):
        self.name, self.asked, self._is_asking = name, 0, False

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name or self._is_asking:
            return None
        self._is_asking = True
        self.asked += 1
        try:
            return importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False


@pytest.mark.parametrize("in_front", [True, False])
def test_another_hook_on_the_same_module_is_asked_too(make_module, heard, in_front):
    name = make_module("")
    asking = Asking(name)
    if not in_front:
        sys.meta_path.insert(0, asking)
    when_imported(name, heard.append)
    if in_front:
        sys.meta_path.insert(0, asking)
    module = importlib.import_module(name)
    assert heard == [module] and asking.asked == 1
    sys.meta_path.remove(asking)


def test_a_module_that_another_thread_is_importing_is_waited_for(make_module, heard):
    name = make_module("import sys\nsys._half_way.set()\nsys._go_on.wait(20)\nnumber = 5\n")
    sys._half_way, sys._go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=importlib.import_module, args=(name,))
    listening = threading.Thread(target=when_imported, args=(name, lambda module: heard.append(module.number)))
    try:
        other.start()
        assert sys._half_way.wait(20)
        listening.start()
        sys._go_on.set()
        other.join(20)
        listening.join(20)
        assert heard == [5]
    finally:
        del sys._half_way, sys._go_on


def test_sources_of_classes_are_found(make_module, heard):
    name = make_module("class Thing:\n    kept = 1\n")
    when_imported(name, heard.append)
    assert inspect.getsource(importlib.import_module(name).Thing) == "class Thing:\n    kept = 1\n"
