"""What Transformers' own generation tests check, on patched models of four families: modes, caches, flags, dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import alone, left_padded, new_tokens
from families import EOS, PAD, build_tiny
from generation.by_family import NEW, OPTIONS, PROMPTS, both, fallbacks_of
from transformers import CompileConfig, DynamicCache, StaticCache

import hfpaged
from hfpaged.compat import cache_field

FLAGS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
MODES = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 1},
    "samples": {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    "beam": {"num_beams": 3},
    "beam sample": {"num_beams": 2, "do_sample": True, "top_k": 5},
    "return sequences": {"num_beams": 3, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "guidance": {"guidance_scale": 1.5},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
# Stock looks up for one row only, and penalizes the padding of a batch in some releases.
ONE_ROW_IN_STOCK = ("prompt lookup", "penalties")


@pytest.mark.parametrize("mode", MODES)
def test_mode_with_all_outputs(family, mode):
    prompts = PROMPTS[:1] if mode in ONE_ROW_IN_STOCK else PROMPTS
    expected, got = both(family, prompts, **MODES[mode], **FLAGS)
    assert type(got) is type(expected)
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(got[name]) == len(expected[name])
        for one, other in zip(got[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    if "sequences_scores" in expected:
        torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=0)
        assert torch.equal(got.beam_indices, expected.beam_indices)
    transitions = [
        model.compute_transition_scores(one.sequences, one.scores, one.get("beam_indices"), normalize_logits=True)
        for model, one in zip(family, (expected, got), strict=True)
    ]
    torch.testing.assert_close(*transitions, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 1], ids=["the same weights", "other weights"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sample"])
def test_assistant(family, options, seed):
    """With one token to draw from, the text is that without an assistant. Transformers 5.17's own code fails with
    one whose attention has windows."""
    assistant = build_tiny(family.stock.config.model_type, seed=seed)
    call = {**left_padded(PROMPTS[2:]), **OPTIONS, **options}
    assert torch.equal(family.paged.generate(**call, assistant_model=assistant), family.stock.generate(**call))


@pytest.mark.parametrize("guess", ["assistant_model", "prompt_lookup_num_tokens"])
def test_guesses_have_the_outputs_of_plain_decoding(family, guess):
    guesses = {guess: 4 if guess == "prompt_lookup_num_tokens" else build_tiny(family.stock.config.model_type)}
    call = {**left_padded(PROMPTS[2:]), **OPTIONS, **FLAGS}
    expected, got = family.stock.generate(**call), family.paged.generate(**call, **guesses)
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(got[name]), torch.stack(expected[name]), atol=1e-4, rtol=1e-4)


def test_guesses_stop_at_an_end_token(family):
    """The prompt repeats itself, so that whole guesses stand, one of them across the end."""
    text = alone(family.stock, PROMPTS[0], **OPTIONS)
    end = {"min_new_tokens": 0, "eos_token_id": text[4]}
    prompts = [PROMPTS[0] + text + PROMPTS[0]]
    for guess in ({"prompt_lookup_num_tokens": 6}, {"assistant_model": build_tiny(family.stock.config.model_type)}):
        expected, got = both(family, prompts, **end, **guess)
        assert torch.equal(got, expected)
        assert got[0, -1] == text[4] or got.shape[1] == len(prompts[0]) + NEW


def test_modes_run_on_the_engine(family):
    for mode, options in MODES.items():
        call = {**left_padded(PROMPTS), **OPTIONS, **options}
        assert fallbacks_of(family.paged, lambda call=call: family.paged.generate(**call)) == {}, mode


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beam"])
def test_attentions_and_hidden_states_have_stocks_shapes_and_values(family, options):
    flags = {**FLAGS, "output_attentions": True, "output_hidden_states": True}
    expected, got = both(family, **flags, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("attentions", "hidden_states"):
        for step, stock_step in zip(got[name], expected[name], strict=True):
            for layer, stock_layer in zip(step, stock_step, strict=True):
                torch.testing.assert_close(layer, stock_layer, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "static", "static object", "dynamic object"])
def test_cache_types_are_honoured(family, kind):
    """What asks for another cache than the engine's runs on stock code, and is counted."""

    def options(model):
        if kind == "static object":
            return {cache_field(): StaticCache(config=model.config, max_cache_len=64)}
        if kind == "dynamic object":
            return {cache_field(): DynamicCache(config=model.config)}
        return {"cache_implementation": kind}

    def text(model):
        return model.generate(**left_padded(PROMPTS), **OPTIONS, **options(model))

    texts = [text(family.stock)]
    counted = fallbacks_of(family.paged, lambda: texts.append(text(family.paged)))
    assert torch.equal(*texts)
    reason = "user cache" if "object" in kind else "cache_implementation"
    assert counted == ({} if kind == "dynamic" else {reason: 1})


@pytest.mark.parametrize("kind", ["magic", "quantized", "offloaded"])
def test_a_cache_that_cannot_be_made_here_gets_stocks_error(family, kind):
    """The quantized one wants a package, and the offloaded one a device, that a machine may or may not have."""

    def outcome(model):
        try:
            return model.generate(**left_padded(PROMPTS), **OPTIONS, cache_implementation=kind).tolist()
        except (ValueError, ImportError, TypeError, AssertionError) as error:
            return type(error), str(error)

    assert outcome(family.paged) == outcome(family.stock)


def test_without_a_cache(family):
    expected, got = both(family, use_cache=False)
    assert torch.equal(got, expected)


def test_left_padding_changes_nothing(family):
    ids, padded = PROMPTS[0], [PAD] * 7 + PROMPTS[0]
    mask = torch.tensor([[0] * 7 + [1] * len(ids)])
    got = family.paged.generate(torch.tensor([padded]), attention_mask=mask, **OPTIONS)[0, len(padded) :]
    assert got.tolist() == alone(family.stock, ids, **OPTIONS)


def test_each_row_is_as_alone(family):
    got = family.paged.generate(**left_padded(PROMPTS), **OPTIONS)
    assert new_tokens(got, PROMPTS) == [alone(family.stock, prompt, **OPTIONS) for prompt in PROMPTS]


def test_goes_on_from_the_returned_cache(family):
    half = {**OPTIONS, "max_new_tokens": NEW // 2, "min_new_tokens": NEW // 2}
    whole = family.stock.generate(**left_padded(PROMPTS), **OPTIONS)
    first = family.paged.generate(**left_padded(PROMPTS), **half, return_dict_in_generate=True)
    mask = torch.cat([left_padded(PROMPTS)["attention_mask"], torch.ones(3, NEW // 2, dtype=torch.long)], dim=1)
    second = {cache_field(): first[cache_field()], "attention_mask": mask}
    assert torch.equal(family.paged.generate(first.sequences, **half, **second), whole)


def test_goes_on_from_its_own_text(family):
    half = {**OPTIONS, "max_new_tokens": NEW // 2, "min_new_tokens": NEW // 2}
    whole = alone(family.stock, PROMPTS[2], **OPTIONS)
    first = alone(family.paged, PROMPTS[2], **half)
    assert first + alone(family.paged, PROMPTS[2] + first, **half) == whole


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "early_stopping": True}], ids=str)
def test_an_end_token_pads_the_rest_of_the_batch(family, options):
    """Rows end at different steps."""
    text = alone(family.stock, PROMPTS[0], **OPTIONS)
    expected, got = both(family, min_new_tokens=0, eos_token_id=[EOS, text[3]], **options)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_16_bit_gives_tokens_of_its_dtype_alone_and_in_a_batch(family, options, dtype):
    model = copy.deepcopy(family.stock).to(dtype).patch()
    together = model.generate(**left_padded(PROMPTS), **OPTIONS, **options)
    assert new_tokens(together, PROMPTS) == [alone(model, prompt, **OPTIONS, **options) for prompt in PROMPTS]
    assert hfpaged.engine(model).stats()["fallbacks"] == {}


def test_a_compiled_model_gives_the_same_text(family):
    model = torch.compile(copy.deepcopy(family.stock), backend="eager")
    hfpaged.patch(model)
    got = model.generate(**left_padded(PROMPTS), **OPTIONS)
    assert torch.equal(got, family.stock.generate(**left_padded(PROMPTS), **OPTIONS))
    hfpaged.unpatch(model)


def test_a_compiled_generate_gives_the_same_text(family):
    model = copy.deepcopy(family.stock).patch()
    model.generate = torch.compile(model.generate, backend="eager")
    with torch.inference_mode():
        got = model.generate(**left_padded(PROMPTS), **OPTIONS)
    assert torch.equal(got, family.stock.generate(**left_padded(PROMPTS), **OPTIONS))


@pytest.fixture
def nothing_compiled():
    """Dynamo counts recompilations over all models that it has seen."""
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_forward_without_graph_breaks_is_stocks(family, nothing_compiled):
    """Whoever compiles the forward of a patched model gets what it computes by itself."""
    ids = torch.tensor([PROMPTS[2]])
    compiled = torch.compile(family.paged.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids).logits, family.stock(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {**FLAGS, "output_hidden_states": True, "output_attentions": True}], ids=len)
def test_stocks_own_compilation_of_the_decoding_loop(family, options, nothing_compiled):
    compilation = CompileConfig(backend="eager", fullgraph=True)
    compilation._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": compilation, **options}
    expected, got = both(family, PROMPTS[2:], **options)[0], both(family, PROMPTS[2:], **static)[1]
    if not options:
        assert torch.equal(got, expected)
        return
    assert torch.equal(got.sequences, expected.sequences)
    for ours, stocks in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, stocks, atol=1e-4, rtol=1e-4)
    assert len(got.hidden_states) == len(got.attentions) == NEW
