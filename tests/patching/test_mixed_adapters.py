"""One batch, several LoRA adapters: each row has the text of a model with its adapter alone, in the same steps."""

from __future__ import annotations

import contextlib
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from batches import left_padded, new_tokens, random_prompts
from oracle import GREEDY, PROMPTS, assert_stock_text, stats
from patching.test_peft import lora, randomize, with_adapters
from peft import LoraConfig, get_peft_model
from transformers import LogitsProcessor, TextIteratorStreamer

import hfpaged
from hfpaged.errors import AdapterLostError, InputError, UnsupportedOptionError

NEW = 8
NAMES = ["red", "blue", "__base__"]
OPTIONS = {**GREEDY, "max_new_tokens": NEW}


@pytest.fixture
def adapted(model):
    return hfpaged.patch(with_adapters(model, "red", "blue"))


def alone_with(model, prompt, name, **options):
    """The text of one prompt on an unpatched copy, with one adapter active or none."""
    fresh = copy.deepcopy(model)
    if name != "__base__":
        fresh.set_adapter(name)
        return new_tokens(fresh.generate(**left_padded([prompt]), **OPTIONS, **options), [prompt])[0]
    with fresh.disable_adapter():
        return new_tokens(fresh.generate(**left_padded([prompt]), **OPTIONS, **options), [prompt])[0]


def test_rows_of_a_batch_as_peft_names_them(adapted):
    want = [alone_with(adapted, prompt, name) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    for _ in range(2):
        out = adapted.generate(**left_padded(PROMPTS), adapter_names=NAMES, **OPTIONS)
        assert new_tokens(out, PROMPTS) == want
    engine = hfpaged.engine(adapted)
    engine.check()
    assert stats(adapted)["fallbacks"] == {}
    assert stats(adapted)["cached_prompt_tokens"] > 0
    assert_stock_text(adapted)  # and the active adapter is what others get


@pytest.mark.parametrize("engine", [{}, {"max_batch_tokens": 7}, {"num_blocks": 6, "preemption": "recompute"}], ids=str)
def test_one_prompt_through_each_adapter_never_shares_blocks(model, engine):
    adapted = hfpaged.patch(with_adapters(model, "red", "blue"), **engine)
    prompt = PROMPTS[0]
    want = {name: alone_with(adapted, prompt, name) for name in NAMES}
    assert len(set(map(tuple, want.values()))) == 3
    engine = hfpaged.engine(adapted)
    handles = {name: engine.submit(prompt, **OPTIONS, hfpaged={"adapter": name}) for name in (*NAMES, *NAMES[::-1])}
    assert {name: handle.result(60) for name, handle in handles.items()} == want
    again = engine.submit(prompt, **OPTIONS, hfpaged={"adapter": "blue"})
    assert again.result(60) == want["blue"]
    engine.check()


def test_threads_with_an_adapter_each_share_steps(adapted):
    jobs = [(PROMPTS[number % 3], NAMES[number % 2]) for number in range(12)]
    want = [alone_with(adapted, *job) for job in jobs[:6]] * 2
    engine = hfpaged.engine(adapted)

    def run(job):
        prompt, name = job
        return new_tokens(adapted.generate(**left_padded([prompt]), **OPTIONS, hfpaged={"adapter": name}), [prompt])[0]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, jobs)) == want
    engine.check()


def test_calls_with_adapter_names_from_threads_mix_up_nothing(adapted):
    """Beside them one that names none, and gets what is active; PEFT has everybody's names on the same layers."""
    jobs = [NAMES[turn:] + NAMES[:turn] for turn in range(3)] + [None]
    want = [
        [alone_with(adapted, prompt, name) for prompt, name in zip(PROMPTS, names or ["red"] * 3, strict=True)]
        for names in jobs
    ]

    def run(names):
        named = {} if names is None else {"adapter_names": names}
        return new_tokens(adapted.generate(**left_padded(PROMPTS), **named, **OPTIONS), PROMPTS)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, jobs * 5)) == want * 5
    hfpaged.engine(adapted).check()
    assert stats(adapted)["fallbacks"] == {}


def test_the_class_of_a_peft_model_comes_back(model):
    adapted = with_adapters(model, "red", "blue")
    original = type(adapted)
    hfpaged.patch(adapted)
    assert type(adapted).__name__ == original.__name__ and isinstance(adapted, original)
    assert type(pickle.loads(pickle.dumps(adapted))) is original
    assert type(copy.deepcopy(adapted)) is original
    hfpaged.unpatch(adapted)
    assert type(adapted) is original


def test_a_list_names_one_for_each_prompt(adapted):
    options = {**OPTIONS, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    out = adapted.generate(**left_padded(PROMPTS), **options, hfpaged={"adapter": NAMES})
    want = [alone_with(adapted, prompt, name) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    assert new_tokens(out, PROMPTS) == [text for text in want for _ in range(2)]


@pytest.mark.parametrize(
    "fields",
    [{"target_modules": ["q_proj", "lm_head", "embed_tokens"]}, {"modules_to_save": ["lm_head"]},
     {"trainable_token_indices": [3, 4, 5]}],
    ids=str,
)  # fmt: skip
def test_an_adapter_on_the_head_and_embeddings(model, fields):
    config = lora()
    vars(config).update(fields)
    peft_model = get_peft_model(model, config, adapter_name="red")
    peft_model.add_adapter("blue", copy.deepcopy(config) if "target_modules" not in fields else lora())
    for seed, name in enumerate(("red", "blue")):
        randomize(peft_model, name, seed)
    adapted = hfpaged.patch(peft_model.eval())
    want = [alone_with(adapted, prompt, name) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    out = adapted.generate(**left_padded(PROMPTS), adapter_names=NAMES, **OPTIONS)
    assert new_tokens(out, PROMPTS) == want


def test_layers_whose_rows_have_no_batch(tiny_model):
    model = tiny_model("opt", ffn_dim=48)  # its MLPs see [tokens, hidden]
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "fc1", "fc2"]), adapter_name="red")
    peft_model.add_adapter("blue", LoraConfig(r=4, target_modules=["fc1"]))
    for seed, name in enumerate(("red", "blue")):
        randomize(peft_model, name, seed)
    adapted = hfpaged.patch(peft_model.eval())
    # As many tokens in a step as a row has elements, too.
    prompts = [*PROMPTS, random_prompts((64,))[0]]
    for prompt, name in zip(prompts, [*NAMES, "red"], strict=True):
        got = hfpaged.engine(adapted).submit(prompt, **OPTIONS, hfpaged={"adapter": name}).result(60)
        assert got == alone_with(adapted, prompt, name)


def test_user_code_sees_the_batch_and_rows_keep_their_adapters(adapted):
    calls = []

    def watch(input_ids, scores):
        calls.append(tuple(input_ids.shape))
        return scores

    options = {**OPTIONS, "logits_processor": [watch]}
    out = adapted.generate(**left_padded(PROMPTS), adapter_names=NAMES, **options)
    want = [alone_with(adapted, prompt, name) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    assert new_tokens(out, PROMPTS) == want
    assert len(calls) == NEW and calls[0][0] == 3


# How a call is decoded, and the reason for which it runs on stock.
MODES = {
    "beams": ({"num_beams": 3}, None),
    "beams of which two come back": ({"num_beams": 3, "num_return_sequences": 2}, None),
    "guidance": ({"guidance_scale": 1.5}, None),
    "stock": ({"use_cache": False}, "use_cache=False"),
    "beams on stock": ({"num_beams": 3, "use_cache": False}, "use_cache=False"),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_sends_rows_through_their_adapters(adapted, mode):
    options, reason = MODES[mode]
    options = {**left_padded(PROMPTS), **OPTIONS, **options}
    fresh = copy.deepcopy(adapted)
    want = [fresh.generate(**options, adapter_names=NAMES[turn:] + NAMES[:turn]) for turn in range(3)] * 2

    def run(turn):
        return adapted.generate(**options, adapter_names=NAMES[turn % 3 :] + NAMES[: turn % 3])

    with ThreadPoolExecutor(4) as pool:
        for got, expected in zip(pool.map(run, range(6)), want, strict=True):
            assert torch.equal(got, expected)
    assert stats(adapted)["fallbacks"] == ({reason: 6} if reason else {})
    assert torch.equal(adapted.generate(**options), fresh.generate(**options))
    hfpaged.engine(adapted).check()


def test_a_model_patched_before_it_was_wrapped_takes_one_call_with_names_at_a_time(model):
    """PEFT has the names in hooks on the layers, which do not say whose they are."""
    adapted = with_adapters(model.patch(), "red", "blue")
    want = [alone_with(adapted, prompt, name) for prompt, name in zip(PROMPTS, NAMES, strict=True)]
    want_active = [alone_with(adapted, prompt, "red") for prompt in PROMPTS]
    named = {**left_padded(PROMPTS), **OPTIONS, "adapter_names": NAMES}
    refused = []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids, scores):
            with ThreadPoolExecutor(1) as pool:
                refused.append(pool.submit(adapted.generate, **left_padded(PROMPTS), **OPTIONS).exception(60))
            return scores

    assert new_tokens(adapted.generate(**named, logits_processor=[Watch()]), PROMPTS) == want
    assert len(refused) == NEW and all(isinstance(error, UnsupportedOptionError) for error in refused)
    assert "hfpaged.patch(peft_model)" in str(refused[0])
    with pytest.raises(ValueError, match="max_new_tokenz"):  # of which PEFT leaves its hooks behind
        adapted.generate(**named, max_new_tokenz=3)
    assert new_tokens(adapted.generate(**left_padded(PROMPTS), **OPTIONS), PROMPTS) == want_active


@pytest.mark.parametrize("message", ["no adapter 'green'", "training mode"])
def test_an_error_of_the_engine_or_of_peft_reaches_who_reads(adapted, message):
    adapted.train(message == "training mode")
    streamer = TextIteratorStreamer(None, skip_prompt=True, timeout=10)
    with pytest.raises(ValueError, match=message):
        adapted.generate(**left_padded(PROMPTS[:1]), **OPTIONS, adapter_names=["green"], streamer=streamer)
    with pytest.raises(ValueError, match=message):
        list(streamer)


def test_what_cannot_be_mixed_is_refused_by_name(adapted, model):
    engine = hfpaged.engine(adapted)
    with pytest.raises(InputError, match=r"no adapter 'green'.*__base__, blue, red"):
        engine.submit(PROMPTS[0], **OPTIONS, hfpaged={"adapter": "green"})
    with pytest.raises(UnsupportedOptionError, match="2 adapters were given for 3 prompts"):
        adapted.generate(**left_padded(PROMPTS), **OPTIONS, hfpaged={"adapter": ["red", "blue"]})
    with pytest.raises(UnsupportedOptionError, match="must be a name"):
        engine.submit(PROMPTS[0], **OPTIONS, hfpaged={"adapter": 3})
    with pytest.raises(UnsupportedOptionError, match="keep one"):
        adapted.generate(**left_padded(PROMPTS), **OPTIONS, adapter_names=NAMES, hfpaged={"adapter": "red"})
    adapted.merge_adapter()
    with pytest.raises(UnsupportedOptionError, match="unmerge"):
        engine.submit(PROMPTS[0], **OPTIONS, hfpaged={"adapter": "red"})


def test_adapters_of_parameters_are_refused_by_name(tiny_model):
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
    adapted = hfpaged.patch(get_peft_model(tiny_model("qwen3_moe"), config, adapter_name="red").eval())
    with pytest.raises(UnsupportedOptionError, match="target_parameters"):
        hfpaged.engine(adapted).submit(PROMPTS[0], **OPTIONS, hfpaged={"adapter": "red"})


def test_without_adapters_there_is_none_to_name(tiny_model):
    model = tiny_model("llama").patch()
    with pytest.raises(InputError, match="known: none"):
        hfpaged.engine(model).submit(PROMPTS[0], **OPTIONS, hfpaged={"adapter": "red"})


def test_plain_calls_are_as_before_once_the_workspace_of_adapters_is_gone(adapted):
    want = alone_with(adapted, PROMPTS[0], "red")
    engine = hfpaged.engine(adapted)
    for name in ("__base__", "blue", "__base__"):
        engine.submit(PROMPTS[0], **OPTIONS, hfpaged={"adapter": name}).result(60)
    engine.release()
    for _ in range(2):
        assert engine.submit(PROMPTS[0], **OPTIONS).result(60) == want


@pytest.mark.parametrize("options", [{"packed_only": True}, {"release_after_call": True}], ids=str)
def test_plain_and_adapter_calls_in_turn(model, options):
    adapted = hfpaged.patch(with_adapters(model, "red", "blue"), **options)
    want = {name: alone_with(adapted, PROMPTS[0], name) for name in ("red", "blue")}
    engine = hfpaged.engine(adapted)
    for _ in range(2):
        assert engine.submit(PROMPTS[0], **OPTIONS).result(60) == want["red"]
        assert engine.submit(PROMPTS[0], **OPTIONS, hfpaged={"adapter": "blue"}).result(60) == want["blue"]
    engine.check()


def change_while_all_run(adapted, change):
    """Errors by adapter name, None for those that were not disturbed."""
    engine = hfpaged.engine(adapted)
    options = {**OPTIONS, "max_new_tokens": 200}
    handles = {name: engine.submit(PROMPTS[0], **options, hfpaged={"adapter": name}) for name in NAMES}
    for handle in handles.values():
        handle.wait_for_token(0)
    change()
    for handle in handles.values():
        with contextlib.suppress(AdapterLostError):
            handle.result(60)
    engine.check()
    return {name: type(handle.error) if handle.error else None for name, handle in handles.items()}


def test_a_deleted_adapter_ends_its_own_requests_only(adapted):
    errors = change_while_all_run(adapted, lambda: adapted.delete_adapter("blue"))
    assert errors == {"red": None, "__base__": None, "blue": AdapterLostError}


def test_a_merged_adapter_ends_requests_that_chose_one(adapted):
    errors = change_while_all_run(adapted, lambda: adapted.merge_adapter(["blue"]))
    assert set(errors.values()) == {AdapterLostError}


def test_submit_does_not_heed_the_adapter_names_of_a_call_in_another_thread(adapted):
    want = alone_with(adapted, PROMPTS[0], "red")
    with adapted._enable_peft_forward_hooks(adapter_names=["blue"]):
        assert hfpaged.engine(adapted).submit(PROMPTS[0], **OPTIONS).result(60) == want
