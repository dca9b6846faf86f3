"""schemathesis makes requests from the app's own OpenAPI document: no status, content type, header or body of an answer
outside it, and no 5xx."""

from __future__ import annotations

import pytest
from serving.conftest import eventually, idle

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

PATHS = 10
CONFORMANCE = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


def run(server, examples: int) -> int:
    """Try every operation with that many generated requests; returns how many were sent."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", server.app)
    sent = 0
    for operation in schema.get_all_operations():
        sent += try_operation(operation.ok(), server.url, examples)
    return sent


def try_operation(operation, url: str, examples: int) -> int:
    sent = 0

    def attempt(case) -> None:
        nonlocal sent
        bound_work(case)
        response = case.call(base_url=url, timeout=60)
        sent += 1
        assert response.status_code < 500 or response.status_code == 503, response.text
        case.validate_response(response, checks=CONFORMANCE)

    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(hypothesis.given(case=operation.as_strategy())(attempt))()
    return sent


def bound_work(case) -> None:
    """The model of the test, and short answers: valid requests would run for minutes otherwise."""
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 8)
        if "messages" in case.body and "max_tokens" not in case.body:
            case.body.setdefault("max_completion_tokens", 8)
        if isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 3)


def test_requests_by_the_schema_get_answers_by_the_schema(server) -> None:
    assert run(server, 8) >= PATHS
    assert eventually(lambda: idle(server.state.client), 20)


@pytest.mark.slow
def test_two_thousand_requests_by_the_schema(server) -> None:
    assert run(server, 2000 // PATHS + 200) >= 2000
    assert eventually(lambda: idle(server.state.client), 20)
