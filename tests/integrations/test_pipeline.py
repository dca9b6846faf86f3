"""A patched text-generation pipeline: stock's results in order, from one batch, lazily, cancelled when closed."""

import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, TextGenerationPipeline

import hfpaged

OPTIONS = {"max_new_tokens": 8, "do_sample": False}
PROMPTS = [f"prompt {'x' * (7 * index % 11)} number {index}" for index in range(12)]


@pytest.fixture
def pipe(tiny_model):
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    # No pad token: one prompt at a time needs none.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    return TextGenerationPipeline(model=tiny_model("llama"), tokenizer=tokenizer, device="cpu")


class Questions(Dataset):
    def __len__(self):
        return len(PROMPTS)

    def __getitem__(self, index):
        return PROMPTS[index]


@pytest.mark.parametrize("make", [list, lambda prompts: (p for p in prompts), lambda prompts: Questions()])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_results_are_stocks_in_order_and_come_from_one_batch(pipe, make, batch_size):
    expected = pipe(list(PROMPTS), **OPTIONS)
    hfpaged.patch(pipe)
    assert list(pipe(make(PROMPTS), batch_size=batch_size, **OPTIONS)) == expected
    stats = hfpaged.engine(pipe).stats()
    assert stats["fallbacks"] == {}
    # One after the other they would take len(PROMPTS) * max_new_tokens steps.
    assert stats["steps"] < len(PROMPTS) * OPTIONS["max_new_tokens"] / 2


def test_chats_and_single_prompts_work_as_before(pipe):
    chats = [[{"role": "user", "content": text}] for text in ("hello", "good bye")]
    expected = [pipe(chats, **OPTIONS), pipe(chats[0], **OPTIONS), pipe(PROMPTS[0], **OPTIONS)]
    hfpaged.patch(pipe)
    assert [pipe(chats, **OPTIONS), pipe(chats[0], **OPTIONS), pipe(PROMPTS[0], **OPTIONS)] == expected


def test_lazy_input_is_read_a_bounded_number_ahead_and_closing_cancels(pipe):
    hfpaged.patch(pipe, max_requests=5)
    read = []

    def prompts():
        for index in range(1000):
            read.append(index)
            yield PROMPTS[index % len(PROMPTS)]

    results = pipe(prompts(), max_new_tokens=200, do_sample=False, eos_token_id=None)
    next(results)
    assert len(read) <= 5 + 1
    results.close()
    deadline = time.monotonic() + 10
    engine = hfpaged.engine(pipe)
    while engine.stats()["running"] + engine.stats()["waiting"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats()["running"] + engine.stats()["waiting"] == 0
    assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]


def test_an_error_reaches_the_caller_and_frees_the_rest(pipe):
    hfpaged.patch(pipe)
    with pytest.raises(ValueError, match="max_new_tokenz"):
        pipe(list(PROMPTS), max_new_tokenz=3)
    engine = hfpaged.engine(pipe)
    engine.check()
    assert engine.stats()["running"] == 0


def test_unpatch_restores_the_pipeline(pipe):
    original = type(pipe)
    hfpaged.patch(pipe)
    assert type(pipe) is not original
    assert type(pipe).__name__ == original.__name__
    hfpaged.unpatch(pipe)
    assert type(pipe) is original
    assert "_hfpaged" not in vars(pipe.model)


def test_a_pipeline_whose_model_was_unpatched_is_stock_again(pipe):
    expected = pipe(list(PROMPTS), **OPTIONS)
    hfpaged.patch(pipe)
    pipe.model.unpatch()
    assert pipe(list(PROMPTS), **OPTIONS) == expected


def test_a_progress_bar_on_request(pipe, capsys):
    hfpaged.patch(pipe)
    pipe(list(PROMPTS[:3]), hfpaged={"progress": True}, **OPTIONS)
    assert "3/3" in capsys.readouterr().err
