"""Small tokenizers of every kind of decoder, and a large real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>"]
CORPUS = [
    "the cat sat on the mat, and the dog didn't . it 's over !  two  spaces\n\nUser: stop",
    "größer naïve 日本語 👩‍👩‍👧 🇺🇸🇩🇪 नमस्ते é � stop it",
] * 20


def _wrap(backend: Tokenizer, clean_up: bool = False) -> PreTrainedTokenizerBase:
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens(["<|plain added|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=clean_up
    )


def byte_level() -> PreTrainedTokenizerBase:
    """As GPT-2, Llama 3, Qwen: any byte is a token, characters are spread over tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    )
    return _wrap(backend)


def metaspace(scheme: str = "always", clean_up: bool = False) -> PreTrainedTokenizerBase:
    """As T5 and XLM-R: the first token of a text loses its space."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend, clean_up)


def byte_fallback(strip: bool = True) -> PreTrainedTokenizerBase:
    """As Llama 2 (strip) and Gemma: what has no token is spelled in bytes, which are valid only together."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehinost", "▁the", "▁st", "op", "日"]
    backend = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _wrap(backend)


def word_piece(clean_up: bool = False) -> PreTrainedTokenizerBase:
    """As BERT: words are joined by spaces."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    )
    return _wrap(backend, clean_up)


def word_suffix() -> PreTrainedTokenizerBase:
    """As the first GPT and CLIP: the end of a word is marked."""
    pieces = ["th", "e</w>", "the</w>", "c", "at</w>", "stop</w>", "</w>"]
    backend = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="</w>"))
    backend.decoder = decoders.BPEDecoder()
    return _wrap(backend)


def no_decoder() -> PreTrainedTokenizerBase:
    """Tokens joined by spaces."""
    return _wrap(Tokenizer(models.WordLevel({"the": 0, "cat": 1, ".": 2, "é": 3}, unk_token="the")))


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level": byte_level,
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "metaspace never": lambda: metaspace("never"),
    "metaspace cleaned": lambda: metaspace("always", clean_up=True),
    "byte fallback stripped": lambda: byte_fallback(strip=True),
    "byte fallback": lambda: byte_fallback(strip=False),
    "word piece": word_piece,
    "word piece cleaned": lambda: word_piece(clean_up=True),
    "word suffix": word_suffix,
    "no decoder": no_decoder,
}


@pytest.fixture(scope="session", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    """One small tokenizer of each kind."""
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> PreTrainedTokenizerBase:
    return byte_level()


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> PreTrainedTokenizerBase:
    return byte_fallback()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_path)
