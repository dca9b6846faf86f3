"""The demo's one tool: arithmetic, without eval and with bounded numbers."""

from __future__ import annotations

import ast
import json
import operator
from typing import Any

NAME = "calculator"
SCHEMA = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Evaluate an arithmetic expression, for example (17 + 4) * 3.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Numbers, + - * / // % ** and parentheses"}},
            "required": ["expression"],
        },
    },
}

LONGEST_EXPRESSION = 200
LARGEST = 1e15
LARGEST_EXPONENT = 64
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def run_call(text: str) -> str:
    """Run a call as a model writes it, `{"name": "calculator", "arguments": {"expression": "..."}}`.

    Returns:
        The number, or what was wrong: the model gets to read either.
    """
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return "error: the call is not valid JSON"
    if isinstance(call, list) and len(call) == 1:
        call = call[0]
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or call.get("name") != NAME:
        return f"error: the only tool is {NAME}, with an argument 'expression'"
    return evaluate(arguments.get("expression"))


def evaluate(expression: Any) -> str:
    """The value of an arithmetic expression, or a text that begins with "error:"."""
    if not isinstance(expression, str) or len(expression) > LONGEST_EXPRESSION:
        return f"error: an expression is a text of at most {LONGEST_EXPRESSION} characters"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {error}"
    return str(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > LARGEST_EXPONENT:
            raise ValueError("the exponent is too large")
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses are understood")


def _bounded(value: float) -> float:
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError(f"only real numbers up to {LARGEST:.0e} are understood")
    return value
