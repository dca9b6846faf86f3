"""The engine in its own process: the same tokens, the same errors, and news in few messages."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from families import build_tiny
from serving.conftest import eventually, idle
from transformers import PreTrainedModel

from hfpaged import serving
from hfpaged.errors import (
    ConfigError,
    EngineDeadError,
    InputError,
    InvalidScoresError,
    RequestCancelled,
    RequestTooLargeError,
    UnsupportedOptionError,
)
from hfpaged.serving.process.client import EngineClient
from hfpaged.serving.process.core_process import CoreProcess
from hfpaged.serving.process.messages import (
    Loading,
    Progress,
    Ready,
    Stop,
    Submit,
    SubmitOptions,
    encode,
    report_decoder,
)
from hfpaged.serving.process.settings import CoreSettings
from hfpaged.serving.process.transport import ClientSockets

GREEDY = {"do_sample": False, "eos_token_id": -1}
PROMPTS = [[5, 6, 7], [9] * 40, list(range(3, 60)), [100, 3]]


@pytest.fixture(scope="module")
def twin() -> PreTrainedModel:
    """The model that the process has loaded."""
    return build_tiny("llama", max_position_embeddings=2048)


def test_tokens_are_those_of_stock(client: EngineClient, twin: PreTrainedModel, stock_greedy: Callable) -> None:
    handles = [client.submit(prompt, max_new_tokens=30, **GREEDY) for prompt in PROMPTS]
    assert [handle.result(30) for handle in handles] == [stock_greedy(twin, prompt, 30) for prompt in PROMPTS]
    assert {handle.finish_reason for handle in handles} == {"length"}
    assert all(handle.started_at >= handle.submitted_at for handle in handles)


def test_handles_can_be_iterated_over_in_both_ways(client: EngineClient) -> None:
    async def collect() -> list[int]:
        return [token async for token in client.submit([5, 6, 7], max_new_tokens=20, **GREEDY)]

    assert asyncio.run(collect()) == list(client.submit([5, 6, 7], max_new_tokens=20, **GREEDY))


def test_a_seed_gives_the_same_sample_here_and_there(client: EngineClient, twin: PreTrainedModel) -> None:
    options = {"max_new_tokens": 20, "do_sample": True, "top_k": 0, "hfpaged": {"seed": 11}, "eos_token_id": -1}
    twin.patch()
    try:
        assert client.submit([5, 6, 7], **options).result() == twin._hfpaged.submit([5, 6, 7], **options).result()
    finally:
        twin.unpatch()


def test_a_cancelled_request_frees_its_blocks(client: EngineClient) -> None:
    handle = client.submit([5, 6, 7], max_new_tokens=1500, **GREEDY)
    next(iter(handle))
    handle.cancel()
    with pytest.raises(RequestCancelled):
        handle.result(10)
    assert eventually(lambda: idle(client))


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, InputError),
        ([-1], {}, InputError),
        ([1 << 40], {}, InputError),
        ([5] * 2048, {}, InputError),
        ([5], {"max_new_tokens": 1 << 22}, RequestTooLargeError),
        ([5], {"max_new_tokens": 10**9}, UnsupportedOptionError),
        ([5], {"temperature": float("nan")}, UnsupportedOptionError),
        ([5], {"repetition_penalty": float("inf")}, UnsupportedOptionError),
        ([5], {"hfpaged": {"seed": 1 << 70}}, UnsupportedOptionError),
        ([5], {"hfpaged": {"cache_salt": "x" * 300}}, UnsupportedOptionError),
        ([5], {"logits_processor": []}, UnsupportedOptionError),
        ([5], {"hfpaged": {"colour": 1}}, UnsupportedOptionError),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_sent(
    client: EngineClient, prompt: list[int], options: dict, error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.submit(prompt, **options)
    assert client.num_running == 0


def test_an_error_of_one_request_is_its_own(client: EngineClient) -> None:
    good = client.submit([5, 6, 7], max_new_tokens=10, **GREEDY)
    # Within the bounds, and makes every score infinite.
    bad = client.submit([5, 6, 7], max_new_tokens=10, do_sample=True, temperature=1e-300)
    with pytest.raises(InvalidScoresError):
        bad.result(10)
    assert len(good.result(10)) == 10


def test_queries_reach_the_engine(client: EngineClient) -> None:
    client.submit([7] * 64, max_new_tokens=1, **GREEDY).result()
    assert client.stats()["blocks_cached"] > 0
    client.reset_prefix_cache()
    assert client.stats()["blocks_cached"] == 0
    client.release()
    assert client.stats()["blocks_total"] == 0
    client.submit([7], max_new_tokens=1, **GREEDY).result()
    assert client.stats()["blocks_total"] == client.info.num_blocks


def test_a_client_that_does_not_read_gets_few_long_messages_and_stops_nobody(model_directory: Path) -> None:
    sockets = ClientSockets("ipc")
    process = CoreProcess(CoreSettings(str(model_directory), sockets.addresses, os.getpid(), threads=1))
    try:
        decoder = report_decoder()
        while not isinstance(report := decoder.decode(sockets.reports.recv()), Ready):
            assert isinstance(report, Loading)
        for request_id in range(20):
            options = SubmitOptions(max_new_tokens=1000, do_sample=False, eos_token_id=-1)
            sockets.requests.send(encode(Submit(request_id, [5 + request_id], options)))
        time.sleep(3)
        tokens, ended, messages = {}, set(), 0
        while len(ended) < 20:
            report = decoder.decode(sockets.reports.recv())
            assert isinstance(report, Progress)
            messages += 1
            for output in report.outputs:
                tokens.setdefault(output.id, []).extend(output.tokens)
                ended |= {output.id} if output.finish_reason else set()
        assert {len(each) for each in tokens.values()} == {1000}
        assert messages < 1000
        sockets.requests.send(encode(Stop()))
        process.end(5)
        assert process.how_it_ended() == "ended with exit code 0"
    finally:
        process.end(0)
        sockets.close()


def test_loopback_takes_no_strangers(model_directory: Path) -> None:
    with EngineClient(str(model_directory), threads=1, transport="tcp") as client:
        address = client._connection._sockets.addresses.requests
        assert address.startswith("tcp://127.0.0.1:")
        # The engine's end of this direction reads only what the client's bound socket sends: a stranger can connect to
        # the client, and must neither take requests away nor send reports.
        with zmq.Context() as context, context.socket(zmq.PULL) as thief, context.socket(zmq.PUSH) as forger:
            thief.connect(address)
            forger.connect(client._connection._sockets.addresses.reports)
            forger.setsockopt(zmq.LINGER, 0)
            forger.send(b"garbage", zmq.NOBLOCK)
            handles = [client.submit([5, 6, 7], max_new_tokens=5, **GREEDY) for _ in range(10)]
            assert {len(handle.result(10)) for handle in handles} == {5}
            assert not thief.poll(100)
        assert client.is_ready


def test_a_model_that_cannot_be_loaded_is_said_so(tmp_path: Path) -> None:
    client = EngineClient(str(tmp_path))
    with pytest.raises(EngineDeadError, match="InputError: cannot load"):
        client.wait_ready(60)
    with pytest.raises(EngineDeadError):
        client.submit([1], max_new_tokens=1)
    client.close()


def test_wrong_options_are_refused_before_a_process_starts(model_directory: Path) -> None:
    with pytest.raises(ConfigError):
        EngineClient(str(model_directory), block_size=0)
    with pytest.raises(ConfigError):
        EngineClient(str(model_directory), transport="carrier pigeon")


def test_nothing_that_is_code_crosses_a_socket() -> None:
    sources = list(Path(serving.__file__).parent.rglob("*.py"))
    assert len(sources) > 5
    for source in sources:
        words = set(re.findall(r"\w+", source.read_text()))
        forbidden = {"pickle", "recv_pyobj", "send_pyobj", "cloudpickle", "dill", "marshal", "eval", "exec"}
        assert not words & forbidden, source
