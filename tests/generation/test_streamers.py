"""Streamers are given what stock gives them."""

from __future__ import annotations

import threading

import pytest
from batches import left_padded
from generation.rows_alone import GREEDY, NEW, PROMPTS
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer


def test_text_streamer_prints_what_stock_prints(pair, tokenizer, capsys):
    printed = []
    for model in pair:
        model.generate(**left_padded([PROMPTS[2]]), streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[0].strip()) >= NEW


def test_text_iterator_streamer_in_the_usual_thread(pair, tokenizer):
    pieces = []
    for model in pair:
        streamer = TextIteratorStreamer(tokenizer, timeout=10)
        call = {**left_padded([PROMPTS[3]]), **GREEDY, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=call)
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1]


class Recorder(BaseStreamer):
    """Writes down everything it is given."""

    def __init__(self):
        self.puts = []

    def put(self, value):
        self.puts.append((value.dtype, value.device.type, value.tolist()))

    def end(self):
        self.puts.append("end")


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_streamer_is_given_what_stock_gives_it(pair, enders, rows):
    seen = []
    for model in pair:
        streamer = Recorder()
        model.generate(**left_padded(PROMPTS[-rows:]), streamer=streamer, eos_token_id=enders, **GREEDY)
        seen.append(streamer.puts)
    assert seen[0] == seen[1]
    assert seen[0][-1] == "end"


def test_streamer_that_takes_one_row_refuses_a_batch_as_in_stock(pair, tokenizer):
    for model in pair:
        with pytest.raises(ValueError, match="only supports batch size 1"):
            model.generate(**left_padded(PROMPTS), streamer=TextStreamer(tokenizer), **GREEDY)
