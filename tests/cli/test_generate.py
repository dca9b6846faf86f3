from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hfpaged.cli.generate import CROSS, TICK, cut_after_end, report_equality
from hfpaged.cli.main import main
from hfpaged.cli.prompts import DEFAULT_PROMPTS, encode, last_line
from hfpaged.errors import InputError


def run(model_directory: Path, *arguments: str) -> int:
    return main(["generate", "--model", str(model_directory), "--max-new-tokens", "6", *arguments])


def test_generate_shows_texts_speed_prefix_hits_and_that_they_equal_stock(
    model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_directory, "hello", "a longer prompt than the other") == 0
    printed = capsys.readouterr().out
    assert "2 of 5 to 30 tokens" in printed
    assert "prefix hits: 0 of 35 prompt tokens" in printed
    assert f"{TICK} {TICK}  2 of 2 as stock's" in printed
    assert printed.count("tokens/s") >= 2


def test_no_compare_leaves_stock_out(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model_directory, "--no-compare", "hello") == 0
    assert "stock" not in capsys.readouterr().out


def test_sampled_texts_are_not_compared(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model_directory, "--sample", "--temperature", "0.7", "--top-p", "0.9", "hello") == 0
    printed = capsys.readouterr().out
    assert "differ by chance" in printed
    assert TICK not in printed and CROSS not in printed


def test_equal_seeds_give_equal_samples(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert run(model_directory, "--sample", "--no-compare", "--seed", seed, "hello") == 0
        texts.append(capsys.readouterr().out.split("patched")[0])
    assert texts[0] == texts[1] != texts[2]


def test_a_sampling_option_without_sample_is_refused(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model_directory, "--top-p", "0.9", "hello") == 2
    assert "--top-p has no effect without --sample" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seed", "-1"),
        ("--seed", str(1 << 32)),
        ("--temperature", "-1"),
        ("--temperature", "0"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", "5"),
        ("--top-p", "0"),
        ("--top-k", "0"),
    ],
)
def test_impossible_sampling_options_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--sample", option, value, "hello"])
    assert stop.value.code == 2
    assert f"error: argument {option}: '{value}' is not " in capsys.readouterr().err


def test_a_prompt_that_is_no_text_is_refused(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model_directory, "caf\udce9") == 2
    assert "a prompt is not valid UTF-8" in capsys.readouterr().err


def test_a_different_float32_text_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_equality([True, False], "float32") == 1
    assert f"{TICK} {CROSS}  1 of 2" in capsys.readouterr().out
    assert report_equality([True, False], "bfloat16") == 0
    assert "near ties" in capsys.readouterr().out


def test_rows_end_with_their_first_end_token() -> None:
    assert cut_after_end([4, 5, 2, 0, 0], (2, 3)) == [4, 5, 2]
    assert cut_after_end([4, 5], (2,)) == [4, 5]


def test_default_prompts_are_unequal_and_some_share_a_long_prefix() -> None:
    assert len({len(prompt) for prompt in DEFAULT_PROMPTS}) == len(DEFAULT_PROMPTS)
    beginnings = [prompt[:500] for prompt in DEFAULT_PROMPTS if len(prompt) > 500]
    assert len(beginnings) == 3 and len(set(beginnings)) == 1


def test_prompts_are_padded_on_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = encode(tokenizer, ["ab", "abcd"])
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_a_chat_template_wraps_each_prompt(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert encode(tokenizer, ["ab"])["input_ids"].tolist() == [tokenizer("<ab>")["input_ids"]]


def test_an_empty_prompt_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match="empty"):
        encode(tokenizer, ["hello", " "])


def test_a_long_last_line_keeps_its_end() -> None:
    assert last_line("first\n" + "x" * 200 + "end", width=10) == "…xxxxxxend"
    assert last_line("first\nshort") == "short"
