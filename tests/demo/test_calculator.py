"""The calculator understands arithmetic and nothing else, in bounded time."""

from __future__ import annotations

import time

import pytest

from hfpaged.demo import calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(17 + 4) * 3", "63"), ("-2 ** 2", "-4"), ("7 // 2 + 7 % 2", "4"), ("1 / 4", "0.25"), ("2 ** 0.5 > 1", None)],
)
def test_arithmetic(expression, value):
    result = calculator.evaluate(expression)
    assert result == value if value else result.startswith("error:")


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getcwd()", "9 ** 9 ** 9", "10 ** 64 * 10 ** 64", "1 / 0", "(-1) ** 0.5", "'a' * 9", "True",
        "1 +", "", None, ["1"], "(" * 199, "1e999", "9" * 500, "x", "0 ** -1",
    ],
)  # fmt: skip
def test_anything_else_is_an_error_at_once(expression):
    began = time.perf_counter()
    assert calculator.evaluate(expression).startswith("error:")
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "calculator", "arguments": {"expression": "6*7"}}',
        '[{"name": "calculator", "arguments": {"expression": "6*7"}}]',
    ],
)
def test_a_call_as_models_write_it(call):
    assert calculator.run_call(call) == "42"


@pytest.mark.parametrize(
    "call", ["", "{", "[]", "42", '{"name": "shell", "arguments": {}}', '{"name": "calculator"}', "[" * 100_000]
)
def test_a_wrong_call_is_an_error_the_model_can_read(call):
    assert calculator.run_call(call).startswith("error:")
