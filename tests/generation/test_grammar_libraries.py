"""The real constraint libraries on a patched model: stock's texts, alone and several calls at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from batches import left_padded, random_prompts
from families import EOS, PAD, VOCAB_SIZE

import hfpaged

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = random_prompts((3, 16, 9))
OPTIONS = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": PAD, "eos_token_id": EOS}
PATTERN = r"[a-c]{3}[0-9]{2}"


def xgrammar_options(tokenizer: Any) -> dict[str, Any]:
    """A grammar of its own for each row. The processor is for one call."""
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    vocabulary = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    info = xgrammar.TokenizerInfo(
        vocabulary, vocab_type=xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[EOS]
    )
    compiler = xgrammar.GrammarCompiler(info)
    grammars = [compiler.compile_grammar(f'root ::= "{letter}" [0-9]+ "!"') for letter in "abc"]
    return {"logits_processor": [LogitsProcessor(grammars)]}


def format_enforcer_options(tokenizer: Any) -> dict[str, Any]:
    library = pytest.importorskip("lmformatenforcer")
    words = [(token, tokenizer.decode([token]), False) for token in range(3, VOCAB_SIZE)]
    data = library.TokenEnforcerTokenizerData(words, tokenizer.decode, EOS, False, VOCAB_SIZE)
    enforcer = library.TokenEnforcer(data, library.RegexParser(PATTERN))

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return enforcer.get_allowed_tokens(ids.tolist()).allowed_tokens

    return {"prefix_allowed_tokens_fn": allowed}


@pytest.mark.parametrize("make", [xgrammar_options, format_enforcer_options], ids=["xgrammar", "lm-format-enforcer"])
def test_constrained_rows_are_stocks(pair, tokenizer, make):
    def texts(model: Any) -> list[str]:
        out = model.generate(**left_padded(PROMPTS), **OPTIONS, **make(tokenizer))
        return tokenizer.batch_decode(out[:, 16:])

    want = texts(pair.stock)
    assert texts(pair.paged) == want
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(texts, [pair.paged] * 8)) == [want] * 8
    engine = hfpaged.engine(pair.paged)
    engine.check()
    assert engine.stats()["fallbacks"] == {}


def test_outlines_writes_what_it_writes_on_stock(pair, tokenizer):
    outlines = pytest.importorskip("outlines")

    def text(model: Any) -> str:
        generator = outlines.Generator(outlines.from_transformers(model, tokenizer), outlines.types.Regex(PATTERN))
        return generator("hello", max_new_tokens=10, do_sample=False)

    want = text(pair.stock)
    assert text(pair.paged) == want
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, [pair.paged] * 4)) == [want] * 4
    assert hfpaged.engine(pair.paged).stats()["fallbacks"] == {}
