"""What FlashInfer 0.7 accepts and gets wrong, or answers with a pause: for each, the test, or why it cannot occur."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

BACKEND, CAPTURED = "cuda/test_backend.py", "cuda/test_captured_steps.py"
DRAWS = "cuda/test_captured_draws.py"
# Trap -> the test that would notice it.
TESTED = {
    "a plan's dtype is float16 unless given":
        f"{BACKEND}::test_results_of_whole_prompts_chunks_and_single_tokens",
    "the order of plan()'s arguments has changed": "cuda/test_signatures.py::test_wrappers",
    "attention is not causal unless asked for":
        f"{BACKEND}::test_results_of_whole_prompts_chunks_and_single_tokens",
    "a window counts the tokens to the left":
        f"{BACKEND}::test_results_of_whole_prompts_chunks_and_single_tokens",
    "the default scale is that of the padded dimension":
        f"{BACKEND}::test_head_dimensions_without_a_kernel_are_padded",
    "sinks are accepted and ignored":
        f"{BACKEND}::test_results_of_whole_prompts_chunks_and_single_tokens",
    "a sink kernel is made for one window kind":
        f"{BACKEND}::test_layers_that_differ_in_more_than_shape_have_plans_of_their_own",
    "head dimensions 80, 96, 112 have no kernel":
        f"{BACKEND}::test_head_dimensions_without_a_kernel_are_padded",
    "decode kernels know few group sizes":
        f"{BACKEND}::test_every_group_size",
    "layers that differ need plans of their own":
        f"{BACKEND}::test_layers_that_differ_in_more_than_shape_have_plans_of_their_own",
    "a plan per layer is a waste, a plan per step enough":
        f"{BACKEND}::test_one_plan_a_step_for_all_layers_of_a_geometry",
    "the page-locked plan buffer is overwritten while copied":
        f"{BACKEND}::test_steps_in_flight_do_not_overwrite_each_others_tables",
    "a plan aliases device tables, and sees later edits":
        f"{BACKEND}::test_steps_in_flight_do_not_overwrite_each_others_tables",
    "tables on the device make plan() wait":
        f"{BACKEND}::test_the_stand_in_refuses_what_the_library_gets_wrong",
    "int64 tables are misread":
        f"{BACKEND}::test_tables_of_any_request_order_and_length",
    "last_page_len is not checked":
        f"{BACKEND}::test_tables_of_any_request_order_and_length",
    "a list of keys and values is not a tuple":
        f"{BACKEND}::test_results_of_whole_prompts_chunks_and_single_tokens",
    "a replay with the plan of the step before":
        f"{CAPTURED}::test_every_replay_comes_after_a_plan_for_it",
    "the batch size of a captured wrapper is fixed":
        f"{CAPTURED}::test_a_batch_is_padded_to_the_next_size",
    "empty requests are undefined, also as padding":
        f"{CAPTURED}::test_padding_of_a_batch",
    "the page buffer of a captured step must hold the worst case":
        f"{CAPTURED}::test_a_batch_with_more_pages_than_the_fixed_tables_hold_runs_uncaptured",
    "every captured size takes memory":
        f"{CAPTURED}::test_capturing_stops_when_its_memory_is_used_up",
    "slots beyond a request's length hold anything": "cuda/test_parity.py::test_preempted_by",
    "random numbers freeze in graphs and depend on the row":
        f"{DRAWS}::test_what_rows_draw_in_captured_steps_is_what_the_host_draws_and_no_mixture_needs_another_capture",
    "top-k and top-p keep other tokens among equals":
        "sampling/test_device_draw.py::test_all_kinds_of_rows_at_once_draw_what_the_host_draws",
    "norms read weights in the dtype of their input":
        "cuda/test_mixed_dtypes.py::test_the_modules_own_code_runs_and_is_counted",
    "products in four bits are zero, or of another layout, on some cards":
        "cuda/test_quantized_products.py::test_a_kernel_that_reads_another_layout_is_refused",
    "rows of NaN crash the sampling kernels":
        "cuda/test_ahead.py::test_a_row_that_cannot_be_drawn_on_the_device_fails_alone",
    "a plan for latents waits for tables on the device":
        "cuda/test_latents.py::test_text_is_stocks_and_the_cache_holds_latents",
    "the causal bound of the latents' kernel loses a key for some numbers of heads":
        "cuda/test_latents.py::test_numbers_of_heads_whose_tiles_end_between_tokens",
    "log-sum-exps have base 2": "cuda/test_cascade.py::test_results",
    "cascades are wrong under sliding windows": "cuda/test_cascade.py::test_layers_that_cannot_be_divided_are_not",
    "merging knows few head dimensions": "cuda/test_cascade.py::test_head_dimensions_that_can_be_merged",
    "run() does not notice a batch that was not planned for":
        f"{BACKEND}::test_one_plan_a_step_for_all_layers_of_a_geometry",
    "ninja fails without saying why, nvcc is too old, headers are missing":
        "cuda/test_probe.py::test_kernels_that_do_not_compile_or_are_wrong_cost_the_backend_and_nothing_else",
    "merging with an empty part gives NaN": "cuda/test_cascade.py::test_a_request_with_one_block_keeps_the_step_whole",
    "import works without a usable backend": "cuda/test_probe.py::test_what_is_wrong_with_the_machine",
    "kernels are compiled at first use, with nvcc":
        "cuda/test_probe.py::test_nvcc_is_looked_for_where_flashinfer_looks",
}  # fmt: skip

# Trap -> why hfpaged cannot fall into it.
CANNOT_OCCUR = {
    "group 7 on tensor cores was reported to degenerate":
        "not excluded: tests/gpu/test_attention.py checks it on the card",
    "custom masks fail on FA3, and packing them waits": "no mask is ever given: block tables say who sees what",
    "fp8 keys and values are wrong at 192/128": "the cache has the dtype of the model, and fp8 is not among DTYPES",
    "NVFP4 keys and values have two layouts": "the cache has the dtype of the model",
    "RoPE and ALiBi inside attention":
        "Transformers applies RoPE before the cache; ALiBi models are refused by support()",
    "append_paged_kv_cache reinterprets dtypes": "it is not called: keys and values go to their slots by index_copy_",
    "trtllm and XQA entry points need architectures": "they are not called",
    "XQA's workspace must be zeroed and its own": "it is not called",
    "BatchAttention's plans always wait": "it is not called",
    "page sizes above 128 were wrong in trtllm kernels": "they are not called",
    "MLA offsets overflowed": "fixed before 0.7.2, the oldest release that the extra installs",
    "replanning a resolved FA3 wrapper with a mask fails": "a wrapper keeps its geometry for life, and has no mask",
    "D = 512 in many graphs accesses illegal memory": "head dimensions above 256 are refused by name",
    "split-KV cannot be turned off under graphs in old versions": "it is never turned off",
    "a backend chosen by itself may change with a later plan":
        "only for several tokens a request (cuDNN) or with masks (FA3): decode plans have one token, plans no mask",
    "where a context is split depends on the rest of the batch":
        "not excluded: last bits depend on the batch, as README says; no split at all would be slow",
    "a changed PATH compiles all kernels anew": "it costs its time, once, and nothing else",
    "q_len_per_req is fixed at capture": "captured steps have one token for each request",
    "a captured prefill wrapper keeps the rows of its first plan": "captured steps of a size have always as many rows",
    "k_scale and v_scale are applied in unlike places": "none is given: the cache is not scaled",
    "a killed compilation leaves a lock on which the next one hangs":
        "not excluded: README says what to delete",
    "scalars are baked into graphs": "scale, window and cap belong to a wrapper, which belongs to one geometry",
    "another device than the current one": "steps run with their device current; models over several are refused",
    "two streams share a workspace": "an engine queues all its work on one stream",
    "a stale compilation cache": "it is the library's, by version; hfpaged changes none of its sources",
    "the float workspace is too small": "the library raises, and the step fails by name",
}  # fmt: skip


@pytest.mark.parametrize("trap", TESTED)
def test_the_test_of_a_trap_exists(trap):
    path, name = TESTED[trap].split("::")
    functions = {node.name for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions


def test_nothing_is_drawn_or_filtered_by_the_library():
    """Its draws have random numbers of their own, and its filters keep other tokens."""
    own = re.compile(r"\.(sampling_from|top_\w+_(renorm|sampling|mask)|chain_speculative|softmax\(logits)\w*")
    for path in (TESTS.parent / "hfpaged").rglob("*.py"):
        source = path.read_text()
        assert "flashinfer" not in source or not own.search(source), path


def test_attention_calls_nothing_else_of_the_library():
    """`CANNOT_OCCUR` says of some parts that they are not called."""
    sources = [path.read_text() for path in (TESTS.parent / "hfpaged/runtime/attention").glob("*.py")]
    called = {name for source in sources for name in re.findall(r"flashinfer\(\)\.([\w.]+)", source)}
    assert called == {
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchAttentionWithAttentionSinkWrapper",
        "mla.BatchMLAPagedAttentionWrapper",
        "mla.MLAPlanMetadata.csr",
        "merge_state",
    }
    assert all(CANNOT_OCCUR.values())
