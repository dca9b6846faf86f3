from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import pytest

from hfpaged.cli.bench.workload import KINDS, BenchRequest, make_workload, read_workload
from hfpaged.errors import InputError

# Of the JSON of five requests with seed 7. Published figures name only kind, count and seed, so these must not change.
GOLDEN = {
    "mixed": "dcdd0c8e793bbed7",
    "decode": "fb7fc08490200316",
    "prefix": "2caf60d18ac53a28",
    "single": "6ea700b3c83ffe84",
    "long": "7c17ffd77e557bf5",
}


def encode(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split(" ")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_count_and_seed_always_give_the_same_token_ids(kind: str) -> None:
    rows = [request._asdict() for request in make_workload(kind, encode, 5, seed=7)]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == GOLDEN[kind]


def test_prefix_requests_share_their_document_and_differ_in_their_question() -> None:
    first, second = make_workload("prefix", encode, 2, seed=0)
    assert first.prompt_token_ids[:999] == second.prompt_token_ids[:999]
    assert first.prompt_token_ids != second.prompt_token_ids


def test_a_workload_file_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "work.json"
    file.write_text('[{"prompt_token_ids": [5, 6], "max_new_tokens": 3}]')
    assert read_workload(file) == [BenchRequest([5, 6], 3)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "cannot read"),
        ("[]", "list of requests"),
        ('{"a": 1}', "list of requests"),
        ("[3]", "request 0: not an object"),
        ('[{"prompt_token_ids": [], "max_new_tokens": 3}]', "list of token ids"),
        ('[{"prompt_token_ids": [1, -2], "max_new_tokens": 3}]', "list of token ids"),
        ('[{"prompt_token_ids": [true], "max_new_tokens": 3}]', "list of token ids"),
        ('[{"prompt_token_ids": [1], "max_new_tokens": 0}]', "positive integer"),
        ('[{"prompt_token_ids": [1]}]', "positive integer"),
    ],
)
def test_a_broken_workload_file_is_refused_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "work.json"
    file.write_text(text)
    with pytest.raises(InputError, match=complaint):
        read_workload(file)


def test_a_missing_workload_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_workload(tmp_path / "absent.json")
