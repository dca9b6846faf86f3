"""Streamed text is the decoded text, in pieces that can be shown at once."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from hfpaged.errors import ConfigError
from hfpaged.text.detokenizer import Detokenizer

FAMILY = "👩\u200d👩\u200d👧\u200d👦"


def stream(detokenizer: Detokenizer, ids: Iterable[int]) -> list[str]:
    return [*(detokenizer.push([token]) for token in ids), detokenizer.finish()]


def random_ids(tokenizer: PreTrainedTokenizerBase, generator: random.Random) -> list[int]:
    """Any tokens of the vocabulary and a few beyond it, in runs that repeat."""
    ids: list[int] = []
    while len(ids) < generator.randint(1, 120):
        ids += [generator.randrange(len(tokenizer) + 3)] * generator.choice([1, 1, 1, 2, 30])
    return ids


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_join_to_the_decoded_text(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
    generator = random.Random(0)
    for _ in range(150):
        ids = random_ids(tokenizer, generator)
        pieces = stream(Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("clean_up", [True, False])
def test_clean_up_can_be_chosen(tokenizer: PreTrainedTokenizerBase, clean_up: bool) -> None:
    generator = random.Random(1)
    for _ in range(50):
        ids = random_ids(tokenizer, generator)
        pieces = stream(Detokenizer(tokenizer, clean_up_tokenization_spaces=clean_up), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up)


def test_pushing_many_tokens_at_once_gives_the_same_text(tokenizer: PreTrainedTokenizerBase) -> None:
    generator = random.Random(2)
    ids = random_ids(tokenizer, generator) + random_ids(tokenizer, generator)
    detokenizer = Detokenizer(tokenizer)
    text, rest = "", list(ids)
    while rest:
        count = generator.randint(0, 20)
        text += detokenizer.push(rest[:count])
        rest = rest[count:]
    assert text + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=True)


def test_real_tokenizer(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    generator = random.Random(3)
    for _ in range(60):
        ids = random_ids(smollm2_tokenizer, generator)
        assert "".join(stream(Detokenizer(smollm2_tokenizer), ids)) == smollm2_tokenizer.decode(
            ids, skip_special_tokens=True
        )


def test_text_comes_without_delay(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    text = "The quick brown fox doesn't jump.\n\ndef f(x):\n    return naïve + Größe + 日本"
    ids = smollm2_tokenizer(text).input_ids
    detokenizer = Detokenizer(smollm2_tokenizer)
    shown = ""
    for count, token in enumerate(ids, start=1):
        shown += detokenizer.push([token])
        known = smollm2_tokenizer.decode(ids[:count])
        assert shown == (known if not known.endswith("\ufffd") else known.rstrip("\ufffd"))


@pytest.mark.parametrize("text", [FAMILY, "👍🏽", "🇺🇸", "❤\ufe0f", "नि", "กำ", "€", "🏴\U000e0067\U000e007f"])
def test_characters_on_screen_come_whole(byte_level_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = byte_level_tokenizer(f"a{text}b{text}{text} {text}").input_ids
    pieces = [piece for piece in stream(Detokenizer(byte_level_tokenizer), ids) if piece]
    assert len(pieces) > 4
    whole = "".join(pieces)
    boundaries = [len("".join(pieces[:count])) for count in range(len(pieces))]
    starts = [start for start in range(len(whole)) if whole.startswith(text, start)]
    inside = {start + offset for start in starts for offset in range(1, len(text))}
    assert not inside & set(boundaries)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_waiting_character_comes_at_the_end(byte_level_tokenizer: PreTrainedTokenizerBase) -> None:
    detokenizer = Detokenizer(byte_level_tokenizer)
    assert detokenizer.push(byte_level_tokenizer("a👍").input_ids) == "a"
    assert detokenizer.finish() == "👍"


def test_an_unfinished_character_ends_as_decode_shows_it(byte_level_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = byte_level_tokenizer("a👍").input_ids[:-1]
    assert "".join(stream(Detokenizer(byte_level_tokenizer), ids)) == "a\ufffd"


def test_bytes_wait_until_they_are_known_to_be_valid(byte_fallback_tokenizer: PreTrainedTokenizerBase) -> None:
    euro = [byte_fallback_tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    letter = byte_fallback_tokenizer.convert_tokens_to_ids("a")
    detokenizer = Detokenizer(byte_fallback_tokenizer)
    assert [detokenizer.push([token]) for token in [letter, *euro, letter]] == ["a", "", "", "", "€a"]
    # One more byte makes all of the run invalid.
    detokenizer.push([*euro, euro[0]])
    assert detokenizer.push([letter]) == "\ufffd" * 4 + "a"


def test_cost_of_a_token_is_bounded(
    byte_level_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    original = type(byte_level_tokenizer).decode

    def counting(self: PreTrainedTokenizerBase, ids: list[int], **options: Any) -> str:
        decoded.append(len(ids))
        return original(self, ids, **options)

    monkeypatch.setattr(type(byte_level_tokenizer), "decode", counting)
    invalid = byte_level_tokenizer.convert_tokens_to_ids("ĳ")
    stream(Detokenizer(byte_level_tokenizer), [invalid] * 500 + byte_level_tokenizer("the cat " * 100).input_ids)
    assert max(decoded) < 20


class TestStopStrings:
    def cut(self, text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
        """The text up to the stop string that is completed first, the longest of those completed together."""
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
        if not found:
            return text, None
        end, _, stop = min(found)
        return text[: end if include_stop else end - len(stop)], stop

    @pytest.mark.parametrize("include_stop", [False, True])
    def test_text_ends_where_the_decoded_text_has_one(
        self, tokenizer: PreTrainedTokenizerBase, include_stop: bool
    ) -> None:
        generator = random.Random(4)
        stops_found = 0
        for _ in range(100):
            ids = random_ids(tokenizer, generator)
            text = tokenizer.decode(ids, skip_special_tokens=True)
            stops = ["the t", "zzz"]
            for _ in range(generator.randint(1, 3)):
                start = generator.randrange(max(1, len(text)))
                stops.append(text[start : start + generator.randint(1, 6)] or "x")
            detokenizer = Detokenizer(tokenizer, stop_strings=stops, include_stop=include_stop)
            pieces = stream(detokenizer, ids)
            assert ("".join(pieces), detokenizer.stopped) == self.cut(text, stops, include_stop)
            stops_found += detokenizer.stopped is not None
        assert stops_found > 50

    def test_no_beginning_of_a_stop_string_is_shown(self, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
        stops = ["\n\nUser:", "User"]
        detokenizer = Detokenizer(smollm2_tokenizer, stop_strings=stops)
        shown = ""
        for token in smollm2_tokenizer("Yes.\n\nUse it.\n\nUser: no").input_ids:
            shown += detokenizer.push([token])
            if detokenizer.stopped is None:
                assert not any(shown.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))
        assert detokenizer.stopped == "User"
        assert shown == "Yes.\n\nUse it.\n\n"

    def test_what_only_began_like_one_comes_at_the_end(self, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
        detokenizer = Detokenizer(smollm2_tokenizer, stop_strings="\n\nUser:")
        pieces = stream(detokenizer, smollm2_tokenizer("Yes.\n\nUse").input_ids)
        assert pieces[-1] == "\n\nUse"
        assert detokenizer.stopped is None

    def test_a_stop_string_may_be_completed_by_finish(self, byte_fallback_tokenizer: PreTrainedTokenizerBase) -> None:
        euro = [byte_fallback_tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
        detokenizer = Detokenizer(byte_fallback_tokenizer, stop_strings=["€"])
        assert "".join(stream(detokenizer, euro)) == ""
        assert detokenizer.stopped == "€"

    def test_nothing_follows_a_stop_string(self, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
        detokenizer = Detokenizer(smollm2_tokenizer, stop_strings=["stop"])
        assert detokenizer.push(smollm2_tokenizer("please stop this").input_ids) == "please "
        assert detokenizer.push(smollm2_tokenizer("more").input_ids) == ""
        assert detokenizer.finish() == ""

    def test_an_empty_stop_string_is_refused(self, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
        with pytest.raises(ConfigError):
            Detokenizer(smollm2_tokenizer, stop_strings=["a", ""])


def test_no_piece_begins_with_a_mark_of_an_indic_letter(smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = smollm2_tokenizer("नमस्ते दुनिया, कैसे हैं आप? สวัสดีครับ").input_ids
    pieces = [piece for piece in stream(Detokenizer(smollm2_tokenizer), ids) if piece]
    assert len(pieces) > 15
    assert not any(unicodedata.category(piece[0]) in ("Mn", "Mc") for piece in pieces)
