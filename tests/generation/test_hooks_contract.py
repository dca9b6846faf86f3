"""Hooks that steer activations or edit the cache: their calls are stock's, and whoever runs beside never notices."""

from __future__ import annotations

import abc
import contextlib
import threading

import pytest
import torch
from batches import alone, left_padded, random_prompts
from generation.noise import noise
from transformers import Cache

import hfpaged

PROMPTS = random_prompts((3, 16, 9))
OPTIONS = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": -1, "pad_token_id": 0}
LONG = {**OPTIONS, "max_new_tokens": 300}
NEIGHBOURS = random_prompts((5, 20, 33, 12), seed=4)


class Hook(abc.ABC):
    """A forward hook for the calls of the thread that made it; those of others pass."""

    def __init__(self) -> None:
        self.trace: list[tuple] = []
        self.owner = threading.get_ident()

    @abc.abstractmethod
    def modules(self, model):
        """Those that it is registered on."""

    @abc.abstractmethod
    def change(self, module, args, kwargs, output):
        """What a hook of PyTorch's returns: another output, or None."""

    @contextlib.contextmanager
    def on(self, model):
        handles = [module.register_forward_hook(self, with_kwargs=True) for module in self.modules(model)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __call__(self, module, args, kwargs, output):
        return self.change(module, args, kwargs, output) if threading.get_ident() == self.owner else None


class SteerLast(Hook):
    """Adds a vector to a layer's output at the last position, as steering-vector libraries do."""

    vector = torch.linspace(-1, 1, 64)

    def modules(self, model):
        return model.model.layers[1:2]

    def change(self, module, args, kwargs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        self.trace.append(tuple(hidden.shape))
        hidden = hidden.clone()
        hidden[:, -1] += self.vector
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


class CacheEditor(Hook):
    """Drops the oldest keys and values of every layer after the prompt, as kvpress does."""

    drop = 2

    def modules(self, model):
        return [layer.self_attn for layer in model.model.layers]

    def change(self, module, args, kwargs, output):
        cache = next(value for value in kwargs.values() if isinstance(value, Cache))
        layer = cache.layers[module.layer_idx]
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        self.trace.append((tuple(hidden.shape), tuple(layer.keys.shape)))
        if hidden.shape[1] > 1:
            layer.keys, layer.values = layer.keys[:, :, self.drop :], layer.values[:, :, self.drop :]


HOOKS = {"SteerLast": (SteerLast, PROMPTS), "CacheEditor": (CacheEditor, PROMPTS[1:2])}


def generate_hooked(model, name):
    make, prompts = HOOKS[name]
    hook = make()
    with hook.on(model):
        return hook.trace, model.generate(**left_padded(prompts), **OPTIONS)


@pytest.mark.parametrize("name", HOOKS)
def test_calls_and_text_are_stocks(pair, name):
    want = generate_hooked(pair.stock, name)
    got = generate_hooked(pair.paged, name)
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])
    plain = pair.stock.generate(**left_padded(HOOKS[name][1]), **OPTIONS)
    assert not torch.equal(want[1], plain)
    # With the hook gone the engine has the call again, and nothing of what the hook did is cached.
    fallbacks = hfpaged.engine(pair.paged).stats()["fallbacks"]
    assert torch.equal(pair.paged.generate(**left_padded(HOOKS[name][1]), **OPTIONS), plain)
    assert hfpaged.engine(pair.paged).stats()["fallbacks"] == fallbacks


@pytest.mark.parametrize("name", HOOKS)
def test_requests_that_run_beside_it_never_notice(pair, name):
    texts = [alone(pair.stock, prompt, **LONG) for prompt in NEIGHBOURS]
    want = generate_hooked(pair.stock, name)
    engine = hfpaged.engine(pair.paged)
    running = [engine.submit(prompt, **LONG) for prompt in NEIGHBOURS]
    next(iter(running[-1]))
    assert not all(handle.done for handle in running)
    got = generate_hooked(pair.paged, name)
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])
    assert [handle.result(60) for handle in running] == texts
    engine.check()


@pytest.mark.parametrize("name", HOOKS)
def test_calls_and_text_are_stocks_among_noise(pair, name):
    """The others' calls go to stock code, too, as long as the hook is there: they do not find it in their own."""
    want = generate_hooked(pair.stock, name)
    with noise(pair.paged):
        for _ in range(2):
            got = generate_hooked(pair.paged, name)
            assert got[0] == want[0]
            assert torch.equal(got[1], want[1])
    hfpaged.engine(pair.paged).check()
