"""The example of mixed adapters runs as it says, with the real PEFT."""

from __future__ import annotations

import pytest
from families import build_tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfpaged.integrations.peft import main

pytest.importorskip("peft")


@pytest.fixture
def directory(tmp_path):
    words = ["<pad>", "<s>", "</s>", "The", "three", "primary", "colours", "are"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"w{index}" for index in range(120))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>").save_pretrained(tmp_path)
    build_tiny("llama").save_pretrained(tmp_path)
    return tmp_path


def test_each_adapter_answers_as_alone(directory, capsys):
    main([str(directory), "--new-tokens", "6"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["first", "second", "__base__", "steps:"]
    assert all("as alone" in line for line in lines[:3])
    assert len({line.split("as alone")[1] for line in lines[:3]}) == 3
