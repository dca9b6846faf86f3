"""Every endpoint through the real openai client."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from families import build_tiny
from transformers import PreTrainedModel, PreTrainedTokenizerBase

openai = pytest.importorskip("openai")

PROMPT = "hello there"


@pytest.fixture
def api(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30) as api:
        yield api


@pytest.fixture(scope="module")
def twin() -> PreTrainedModel:
    return build_tiny("llama", max_position_embeddings=2048)


@pytest.fixture
def greedy(api: openai.OpenAI) -> Callable[..., str]:
    """The greedy completion of a prompt."""

    def complete(prompt: str = PROMPT, max_tokens: int = 20, **options) -> str:
        done = api.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
            **options,
        )
        return done.choices[0].text

    return complete


def test_the_model_is_listed(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model of that name"):
        api.models.retrieve("gpt-6")


def test_a_completion_is_stocks_text(
    greedy: Callable[..., str], twin: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stock_greedy: Callable
) -> None:
    ids = tokenizer(PROMPT)["input_ids"]
    assert greedy() == tokenizer.decode(stock_greedy(twin, ids, 20), skip_special_tokens=True)


def test_a_stream_is_the_same_text_and_ends_with_usage(api: openai.OpenAI, greedy: Callable[..., str]) -> None:
    stream = api.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == greedy()
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens == len(PROMPT)


def test_prompts_may_be_several_and_token_ids(
    api: openai.OpenAI, greedy: Callable[..., str], tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = ["one", "another prompt"]
    options = {"model": "tiny", "max_tokens": 20, "temperature": 0, "extra_body": {"ignore_eos": True}}
    want = [greedy(prompt) for prompt in prompts]
    assert [choice.text for choice in api.completions.create(prompt=prompts, **options).choices] == want
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert [choice.text for choice in api.completions.create(prompt=ids, **options).choices] == want
    assert api.completions.create(prompt=ids[0], **options).choices[0].text == want[0]


def test_echo_puts_the_prompt_in_front(greedy: Callable[..., str]) -> None:
    assert greedy(echo=True) == PROMPT + greedy()


def test_a_stop_string_ends_the_text_before_it(greedy: Callable[..., str], api: openai.OpenAI) -> None:
    whole = greedy(max_tokens=60)
    stop = whole[20:22]
    cut = whole[: whole.index(stop)]
    done = api.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, stop=[stop], extra_body={"ignore_eos": True}
    )
    assert done.choices[0].text == cut
    assert done.choices[0].finish_reason == "stop"
    stream = api.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=60,
        temperature=0,
        stop=stop,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == cut


def test_a_seed_repeats_and_choices_differ(api: openai.OpenAI) -> None:
    def texts(seed: int, n: int) -> list[str]:
        done = api.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=seed, n=n, temperature=1.5)
        return [choice.text for choice in done.choices]

    assert texts(5, 3) == texts(5, 3)
    assert len(set(texts(5, 3))) == 3
    assert texts(5, 1) == texts(5, 3)[:1]
    assert texts(6, 1) != texts(5, 1)


def test_biases_and_penalties_reach_the_sampler(api: openai.OpenAI, greedy: Callable[..., str]) -> None:
    token = api.post("/../tokenize", cast_to=object, body={"prompt": "Z"})["tokens"][0]
    # The tokenizer has no decoder, which puts spaces between tokens.
    assert greedy(logit_bias={str(token): 100}).replace(" ", "") == "Z" * 20
    assert len(set(greedy(max_tokens=40, frequency_penalty=2, presence_penalty=2))) >= len(set(greedy(max_tokens=40)))
    assert greedy(max_tokens=40, frequency_penalty=2, presence_penalty=2) != greedy(max_tokens=40)


def test_logprobs_of_a_completion(api: openai.OpenAI) -> None:
    done = api.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3)
    scores = done.choices[0].logprobs
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == done.usage.completion_tokens
    for token, logprob, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())


def test_a_chat_answer_whole_and_streamed(api: openai.OpenAI, greedy: Callable[..., str]) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    options = {
        "model": "tiny",
        "messages": messages,
        "max_completion_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    done = api.chat.completions.create(**options)
    assert done.choices[0].message.content == greedy("system: be brief\nuser: hi\nassistant: ", 12)
    assert done.choices[0].finish_reason == "length"
    assert len(done.choices[0].logprobs.content) == 12
    assert all(len(one.top_logprobs) == 2 for one in done.choices[0].logprobs.content)
    chunks = list(api.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == done.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12


def test_several_choices_share_a_stream(api: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 15, "seed": 3, "n": 4}
    whole = [choice.text for choice in api.completions.create(**options).choices]
    texts = [""] * 4
    for chunk in api.completions.create(stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == whole


def test_tools_are_shown_to_the_model_and_history_with_calls_is_taken(api: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    plain = api.chat.completions.create(model="tiny", messages=messages, max_tokens=5)
    shown = api.chat.completions.create(model="tiny", messages=messages, tools=[tool], max_tokens=5)
    hidden = api.chat.completions.create(
        model="tiny", messages=messages, tools=[tool], tool_choice="none", max_tokens=5
    )
    assert shown.usage.prompt_tokens > plain.usage.prompt_tokens == hidden.usage.prompt_tokens


def test_text_to_tokens_and_back(api: openai.OpenAI) -> None:
    tokens = api.post("/../tokenize", cast_to=object, body={"model": "tiny", "prompt": PROMPT})
    assert tokens["count"] == len(tokens["tokens"]) == len(PROMPT)
    text = api.post("/../detokenize", cast_to=object, body={"tokens": tokens["tokens"]})
    assert text["prompt"].replace(" ", "") == PROMPT.replace(" ", "")
    chat = api.post("/../tokenize", cast_to=object, body={"messages": [{"role": "user", "content": "hi"}]})
    assert chat["count"] == len("user: hi\nassistant: ")


def test_a_stream_that_is_closed_frees_its_blocks(api: openai.OpenAI) -> None:
    with api.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    # The fixtures check that nothing runs and no block is held.


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"n": 129}, "n"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"extra_body": {"chat_template_kwargs": {"tools": "x"}}}, None),
    ],
)
def test_what_is_not_supported_is_refused_by_name(api: openai.OpenAI, options: dict, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        api.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], **options)
    assert refusal.value.body["param"] == param
    assert (param or "tools") in refusal.value.body["message"]


@pytest.mark.parametrize("options", [{"suffix": "x"}, {"best_of": 3}, {"echo": True, "logprobs": 1}])
def test_unsupported_completions_are_refused_by_name(api: openai.OpenAI, options: dict) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(options))):
        api.completions.create(model="tiny", prompt=PROMPT, **options)
