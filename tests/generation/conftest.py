"""What the tests of generate() on the engine share."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from batches import alone
from families import VOCAB_SIZE, build_tiny
from generation.rows_alone import GREEDY, PROMPTS
from quiet import small_and_quiet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    with small_and_quiet():
        yield


class Pair(NamedTuple):
    """One model twice: as it is, and patched."""

    stock: PreTrainedModel
    paged: PreTrainedModel


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    stock = build_tiny("llama")
    paged = copy.deepcopy(stock)
    paged.patch()
    yield Pair(stock, paged)
    paged.unpatch()


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    """Greedy texts that nothing ends."""
    return [alone(pair.stock, prompt, eos_token_id=-1, **GREEDY) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def enders(plain: list[list[int]]) -> list[int]:
    """End tokens at which some of the rows end early and others do not."""
    return [plain[1][2], plain[3][6]]


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2", "mistral"])
def family(request) -> Iterator[Pair]:
    """A pair of each of the families whose generation Transformers tests most."""
    stock = build_tiny(request.param)
    paged = copy.deepcopy(stock).patch()
    yield Pair(stock, paged)
    paged.unpatch()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Every token of the tiny vocabulary but the special ones is one character."""
    printable = [chr(code) for code in range(32, 127)]
    others = [chr(0x100 + index) for index in range(VOCAB_SIZE - 3 - len(printable))]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *printable, *others])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
