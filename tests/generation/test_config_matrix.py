"""Every field of GenerationConfig and every argument of generate(), one by one and in pairs, against stock.

On a tiny Llama always, and on SmolLM2 among the slow tests.

A field that a later release of Transformers adds fails the first test until `config_fields.py` has a probe for it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from batches import alone, random_prompts
from families import PAD, build_tiny
from generation.config_fields import ARGUMENTS, CHANGES, FIELDS, REFUSED, SILENT, STOCK, Options, Scene, made
from generation.conftest import Pair
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hfpaged
from hfpaged.errors import InputError, InvalidScoresError

PROBES = {**FIELDS, **ARGUMENTS}
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def add(a, b):\n    return a + b\n\ndef sub",
    "Water boils at one hundred degrees, and it freezes at zero degrees",
)
LENGTH = 12
BASE: Options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": -1, "pad_token_id": PAD}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

TINY, SMOLLM2 = "tiny", pytest.param("smollm2", marks=pytest.mark.slow)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def tiny(pair, tokenizer) -> tuple[Pair, Scene]:
    return pair, scene_of(pair, random_prompts((LENGTH,) * 3, seed=5), tokenizer)


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Iterator[tuple[Pair, Scene]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    stock = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    pair = Pair(stock, copy.deepcopy(stock).patch())
    yield pair, scene_of(pair, [tokenizer(text)["input_ids"][:LENGTH] for text in TEXTS], tokenizer)
    pair.paged.unpatch()


def scene_of(pair: Pair, prompts: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> Scene:
    assistant = build_tiny("llama", seed=1, num_hidden_layers=1, vocab_size=pair.stock.config.vocab_size)
    return Scene(prompts, [alone(pair.stock, prompt, **BASE) for prompt in prompts], tokenizer, assistant)


@pytest.fixture(scope="module")
def pair_and_scene(request) -> tuple[Pair, Scene]:
    return request.getfixturevalue(request.param)


def call(model: PreTrainedModel, prompts: list[list[int]], options: Options) -> Any:
    """What a call returns, or the error that it raises."""
    torch.manual_seed(0)
    ids = torch.tensor(prompts)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **BASE, **options}
    try:
        return model.generate(**arguments)
    except Exception as error:
        return error


def difference(got: Any, want: Any) -> str | None:
    """Where two results of `generate` differ, or None. Floats may differ by rounding."""
    if isinstance(got, InputError | InvalidScoresError) and type(want) is RuntimeError:
        return None  # where stock fails in the middle of an operation, the engine says what is wrong
    if type(got).__name__ != type(want).__name__:
        return f"{got!r} instead of {want!r}"
    if isinstance(want, Exception):
        return None if str(got) == str(want) else f"{got} instead of {want}"
    if torch.is_tensor(want):
        return _tensor_difference(got, want)
    if isinstance(want, tuple | list):
        pairs = zip(got, want, strict=False)
        found = (difference(*both) for both in pairs)
        return next(filter(None, found), None) if len(got) == len(want) else f"{len(got)} instead of {len(want)}"
    if isinstance(want, dict):
        if [name for name in got if name not in CACHES] != [name for name in want if name not in CACHES]:
            return f"{list(got)} instead of {list(want)}"
        found = ((name, difference(got[name], want[name])) for name in want if name not in CACHES)
        return next((f"{name}: {what}" for name, what in found if what), None)
    return None if isinstance(want, Cache) or got == want else f"{got} instead of {want}"


def without_ended_rows(output: Any, pad: int) -> Any:
    """An output without the scores and logits of rows that have ended: stock's are of their padding."""
    if isinstance(output, Exception) or torch.is_tensor(output) or "beam_indices" in output:
        return output
    kept = dict(output)
    for name in ("scores", "logits"):
        steps = output.get(name) or ()
        first = output.sequences.shape[1] - len(steps)
        kept[name] = [
            [
                row
                for row, text in zip(step, output.sequences[:, first:].tolist(), strict=True)
                if pad not in text[: at + 1]
            ]
            for at, step in enumerate(steps)
        ]
    return kept


CACHES = ("cache", "past_key_values")


def _tensor_difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    same = torch.allclose(got, want, **TOLERANCE) if want.is_floating_point() else torch.equal(got, want)
    return None if same else f"{got.tolist()} instead of {want.tolist()}"[:500]


def draws(options: Options) -> bool:
    """Whether the text is drawn by the engine's own random numbers."""
    return bool(options.get("do_sample")) and options.get("top_k") != 1 and not options.get("num_beams")


def fallbacks(model: PreTrainedModel) -> dict[str, int]:
    return hfpaged.engine(model).stats()["fallbacks"]


def test_every_field_and_argument_has_a_probe():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - set(FIELDS) == set()
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert arguments - set(ARGUMENTS) == set()
    assert {probe.kind for probe in PROBES.values()} == {CHANGES, SILENT, STOCK, REFUSED}
    assert all(probe.reason for probe in PROBES.values() if probe.kind != CHANGES)


@pytest.mark.parametrize("pair_and_scene", [TINY, SMOLLM2], indirect=True)
@pytest.mark.parametrize("name", PROBES)
def test_each_by_itself(pair_and_scene, name):
    pair, scene = pair_and_scene
    probe = PROBES[name]
    needs = made(probe.needs, scene)
    if draws({**needs, **made(probe.options, scene)}):
        # One step, whose scores say all that the option does; the drawn token is another generator's.
        needs.update(max_new_tokens=1, return_dict_in_generate=True, output_scores=True)
    prompts = scene.prompts[:1]
    want = call(pair.stock, prompts, {**needs, **made(probe.options, scene)})
    before = fallbacks(pair.paged)
    got = call(pair.paged, prompts, {**needs, **made(probe.options, scene)})
    after = fallbacks(pair.paged)
    new = {reason for reason in after if after[reason] > before.get(reason, 0)}
    if draws({**needs, **made(probe.options, scene)}):
        got, want, plain = got.scores, want.scores, call(pair.stock, prompts, needs).scores
    else:
        plain = call(pair.stock, prompts, needs)
    assert difference(got, want) is None
    assert isinstance(want, Exception) == (probe.kind == REFUSED)
    assert (difference(want, plain) is None) == (probe.kind == SILENT) or probe.kind in (STOCK, REFUSED)
    assert probe.reason in new if probe.kind == STOCK else probe.kind == REFUSED or not new


# ---- pairs ----


def pairwise(names: list[str], width: int, seed: int = 0) -> Iterator[tuple[str, ...]]:
    """Subsets of at most `width` names such that any two names meet in one of them: a greedy covering design."""
    source = random.Random(seed)
    missing = set(itertools.combinations(names, 2))
    while missing:
        chosen = list(min(missing, key=lambda pair: (names.index(pair[0]), names.index(pair[1]))))
        while len(chosen) < width:
            gains = {
                name: sum(pair_of(name, one, names) in missing for one in chosen)
                for name in names
                if name not in chosen
            }
            most = max(gains.values())
            if most == 0:
                break
            chosen.append(source.choice([name for name, gain in gains.items() if gain == most]))
        missing -= {pair_of(*both, names) for both in itertools.combinations(chosen, 2)}
        yield tuple(chosen)


def pair_of(one: str, other: str, names: list[str]) -> tuple[str, str]:
    return (one, other) if names.index(one) < names.index(other) else (other, one)


def merged(names: Iterable[str], scene: Scene) -> Options:
    """Options of one call that probes several fields at once."""
    options: Options = {}
    for parts in ("needs", "options"):
        for name in names:
            options.update(made(getattr(PROBES[name], parts), scene))
    if draws(options):
        options.update(return_dict_in_generate=True, output_scores=True)
    return options


def answer(model: PreTrainedModel, prompts: list[list[int]], names: Iterable[str], scene: Scene) -> Any:
    """What can be compared between stock and the engine of a call that probes several fields."""
    options = merged(names, scene)
    output = call(model, prompts, options)
    if draws(options) and isinstance(output, dict):
        return {"scores": output["scores"][:1]}
    return without_ended_rows(output, options.get("pad_token_id", PAD))


SPECULATION = {"prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_model"}


def check_together(pair: Pair, scene: Scene, names: tuple[str, ...]) -> Iterator[str]:
    """What differs when these fields are set together: on one prompt, and on a batch without padding."""
    for prompts in (scene.prompts[:1], scene.prompts):
        want = answer(pair.stock, prompts, names, scene)
        got = answer(pair.paged, prompts, names, scene)
        if isinstance(want, ValueError) and not isinstance(got, Exception):
            # Stock speculates for one row only, and gives its assistant no tokenizer. Here the engine does more,
            # without a change of the text.
            want = answer(pair.stock, prompts, [name for name in names if name not in SPECULATION], scene)
        found = difference(got, want)
        if found:
            yield f"{len(prompts)} x {names}: {found}"


@pytest.mark.parametrize(
    ("pair_and_scene", "width"),
    [(TINY, 8), pytest.param(TINY, 3, marks=pytest.mark.slow), pytest.param("smollm2", 8, marks=pytest.mark.slow)],
    indirect=["pair_and_scene"],
)
def test_any_two_together(pair_and_scene, width):
    pair, scene = pair_and_scene
    names = [name for name, probe in PROBES.items() if probe.kind != REFUSED]
    assert [what for row in pairwise(names, width) for what in check_together(pair, scene, row)] == []
    hfpaged.engine(pair.paged).check()
