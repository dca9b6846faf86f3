from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import hfpaged
from hfpaged.generation.request_options import RequestOptions

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.parametrize("options", [hfpaged.EngineConfig, RequestOptions])
def test_every_option_is_in_a_table_with_its_default(options: type) -> None:
    for field in fields(options):
        default = f'`"{field.default}"`' if isinstance(field.default, str) else str(field.default)
        assert f"| `{field.name}` | {default} |" in README, field.name


def test_every_statistic_is_in_the_table(tiny_model: Callable[..., PreTrainedModel]) -> None:
    with hfpaged.patched(tiny_model("llama")) as model:
        keys = set(hfpaged.engine(model).stats())
    table = README[README.index("| key | meaning |") : README.index("On the command line")]
    assert set(re.findall(r"`(\w+)`", table)) == keys


def test_every_python_example_compiles() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        compile(example, "README.md", "exec")
