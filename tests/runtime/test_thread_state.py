"""Autocast travels with a request; gradients and inference mode do not."""

import torch

from hfpaged.runtime.thread_state import ThreadState


def test_equal_states_compare_equal_and_autocast_differs():
    plain = ThreadState.capture("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        cast = ThreadState.capture("cpu")
    assert plain == ThreadState.capture("cpu")
    assert cast != plain


def test_applied_state_computes_as_the_captured_thread_did():
    with torch.autocast("cpu", torch.bfloat16):
        state = ThreadState.capture("cpu")
    with state.applied():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_nothing_made_in_a_step_is_an_inference_tensor_or_needs_gradients():
    with torch.inference_mode():
        with ThreadState.capture("cpu").applied():
            made = torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert not made.is_inference()
    assert not made.requires_grad
