"""The examples run as they say, each with the real library; those of big libraries among the slow tests."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")

# Example, the package that it wants, and how many texts it compares.
EXAMPLES = [
    ("pipeline", "transformers", 4),
    pytest.param("xgrammar", "xgrammar", 3, marks=pytest.mark.slow),
    pytest.param("outlines", "outlines", 3, marks=pytest.mark.slow),
    pytest.param("lm_format_enforcer", "lmformatenforcer", 3, marks=pytest.mark.slow),
    pytest.param("lm_eval", "lm_eval", 6, marks=pytest.mark.slow),
]


def run(example, directory, capsys):
    importlib.import_module(f"hfpaged.integrations.{example}").main([str(directory), "--new-tokens", "6"])
    return capsys.readouterr().out.splitlines()


def test_peft_each_adapter_answers_as_alone(directory, capsys):
    pytest.importorskip("peft")
    lines = run("peft", directory, capsys)
    assert [line.split()[0] for line in lines] == ["first", "second", "__base__", "steps:"]
    assert all("as alone" in line for line in lines[:3])
    assert len({line.split("as alone")[1] for line in lines[:3]}) == 3


@pytest.mark.parametrize(("example", "package", "count"), EXAMPLES)
def test_texts_are_stocks(example, package, count, directory, capsys):
    pytest.importorskip(package)
    lines = run(example, directory, capsys)
    assert sum("as stock" in line for line in lines) == count
    assert not any("DIFFERS" in line for line in lines)
