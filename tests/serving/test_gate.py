"""API key, CORS, hosts, request ids, access log, metrics."""

from __future__ import annotations

import json
import logging

import httpx
import pytest
from serving.conftest import eventually

KEY = "a-secret-of-some-length"


@pytest.fixture(scope="module")
def guarded(shared_client, tokenizer):
    from serving.running_server import running_server

    with running_server(
        shared_client, tokenizer, api_key=KEY, cors_origins=["https://a.example"], allowed_hosts=["127.0.0.1"]
    ) as server:
        yield server


def test_every_route_but_health_wants_the_key(guarded) -> None:
    paths = [route.path for route in guarded.app.routes if hasattr(route, "path")]
    documented = list(guarded.app.openapi()["paths"])
    assert len(documented) > 8
    for path in {*paths, *documented, "/nowhere", "//v1/models", "/health/../v1/models"}:
        for method in ("GET", "POST"):
            answer = httpx.request(method, guarded.url + path.replace("{name}", "tiny").replace("{name:path}", "tiny"))
            is_open = path in ("/health", "/health/live", "/health/ready")
            assert (answer.status_code != 401) == is_open, path


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xff"])
def test_a_wrong_key_is_refused(guarded, header: str) -> None:
    headers = {"Authorization": header.encode("latin-1")}
    answer = httpx.get(f"{guarded.url}/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in answer.text


def test_the_key_opens_and_is_not_logged(guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "mine-1"}
        answer = httpx.get(f"{guarded.url}/v1/models", headers=headers)
        assert eventually(lambda: "mine-1" in caplog.text)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine-1"
    entry = json.loads(next(record.message for record in caplog.records if record.name == "hfpaged.access"))
    assert entry["path"] == "/v1/models" and entry["status"] == 200 and entry["request_id"] == "mine-1"
    assert KEY not in caplog.text


def test_hosts_and_origins_are_those_named(guarded, server) -> None:
    assert httpx.get(f"{guarded.url}/health/live", headers={"Host": "evil.example"}).status_code == 400
    origin = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{guarded.url}/v1/completions", headers=origin)
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    # Off unless asked for.
    plain = httpx.get(f"{server.url}/health/live", headers={"Origin": "https://a.example", "Host": "any.example"})
    assert plain.status_code == 200 and "access-control-allow-origin" not in plain.headers


def test_a_bad_request_id_is_replaced(server) -> None:
    for bad in ("x" * 100, "a b", 'a"b'):
        answer = httpx.get(f"{server.url}/health/live", headers={"X-Request-Id": bad})
        assert answer.headers["x-request-id"] not in (bad, "")


def test_metrics_count_what_happened(server) -> None:
    def value(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).split()[-1])

    before = {name: value(name) for name in ("hfpaged_generated_tokens_total", "hfpaged_queue_seconds_count")}
    # More than arrive in one message, so that there is a time between two.
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 700, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert value("hfpaged_generated_tokens_total") == before["hfpaged_generated_tokens_total"] + 700
    assert value("hfpaged_queue_seconds_count") == before["hfpaged_queue_seconds_count"] + 1
    assert value("hfpaged_time_to_first_token_seconds_count") > 0
    assert value("hfpaged_inter_token_seconds_count") > 0
    assert 0 <= value("hfpaged_kv_usage") <= 1
    for name in (
        "running",
        "waiting",
        "cached_prompt_tokens_total",
        "preemptions_recompute_total",
        "prompt_tokens_total",
    ):
        assert value(f"hfpaged_{name}") >= 0
