"""How much memory requests hold: shared prefixes once, at most a part of a block wasted, never more than padded KV."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
from batches import left_padded, random_prompts
from engine.hooks import WAIT_SECONDS, after_each_step, paused, used_blocks, with_import_paths
from internals import workspace_of

BLOCK = 16
GREEDY = {"do_sample": False, "eos_token_id": -1}


def blocks_for(num_tokens):
    return -(-num_tokens // BLOCK)


def test_a_request_wastes_less_than_a_block(patched):
    model, engine = patched(prefix_caching=False, max_batch_tokens=50)
    prompts = random_prompts((1, 15, 16, 17, 40))

    def held():
        requests = workspace_of(engine).scheduler.requests.values()
        return used_blocks(engine), [request.computed for request in requests]

    with after_each_step(engine, held) as steps:
        model.generate(**left_padded(prompts), max_new_tokens=40, **GREEDY)
    assert len(steps) >= 40
    for blocks, computed in steps:
        assert blocks == sum(map(blocks_for, computed))
        assert blocks * BLOCK - sum(computed) <= (BLOCK - 1) * len(computed)
    assert max(blocks for blocks, _ in steps) <= sum(blocks_for(len(prompt) + 40) for prompt in prompts)


@pytest.mark.parametrize("first_alone", [False, True])
def test_requests_with_a_common_prefix_hold_it_once(patched, first_alone):
    """64 requests, 1,000 tokens in common: its 62 full blocks are held once, also if all arrive together."""
    _, engine = patched(config={"max_position_embeddings": 2048, "num_hidden_layers": 2})
    prompts = random_prompts([1009] * 64, common_prefix=1000)
    assert len(set(map(tuple, prompts))) == 64
    first = prompts[0] if first_alone else prompts[0][:8]
    engine.submit(first, max_new_tokens=1, **GREEDY).result(WAIT_SECONDS)
    before = engine.stats()
    with after_each_step(engine, lambda: (used_blocks(engine), engine.stats()["running"])) as steps:
        with paused(engine):
            handles = [engine.submit(prompt, max_new_tokens=20, **GREEDY) for prompt in prompts]
        for handle in handles:
            handle.result(WAIT_SECONDS)
    assert max(running for _, running in steps) == 64
    own_blocks = blocks_for(1009 + 20 - 1) - 62
    assert max(blocks for blocks, _ in steps) <= 62 + 64 * own_blocks
    hits = engine.stats()["cached_prompt_tokens"] - before["cached_prompt_tokens"]
    assert hits >= (64 if first_alone else 63) * 62 * BLOCK


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [47, 48, 50])
def test_return_sequences_hold_the_prompt_once(patched, length, prefix_cache):
    model, engine = patched()
    prompts = random_prompts([length])
    with after_each_step(engine, lambda: used_blocks(engine)) as used:
        model.generate(
            **left_padded(prompts), num_return_sequences=16, do_sample=True, max_new_tokens=20, eos_token_id=-1,
            hfpaged={"seed": 1, "prefix_cache": prefix_cache},
        )  # fmt: skip
    shared = length // BLOCK
    assert used[0] == blocks_for(length)
    assert max(used) == shared + 16 * (blocks_for(length + 20 - 1) - shared)
    assert engine.stats()["prompt_tokens"] == 16 * length
    assert engine.stats()["cached_prompt_tokens"] == 15 * length


def test_blocks_in_use_never_pass_padded_kv_and_one_block_a_row(patched):
    model, engine = patched()
    lengths = (3, 20, 33, 120, 90, 7, 64, 65)
    with after_each_step(engine, lambda: used_blocks(engine)) as used:
        model.generate(**left_padded(random_prompts(lengths)), max_new_tokens=30, **GREEDY)
    padded = len(lengths) * (max(lengths) + 30)
    assert max(used) * BLOCK <= padded + len(lengths) * BLOCK
    assert max(used) * BLOCK <= sum(lengths) + len(lengths) * (30 + BLOCK)


def test_memory_of_earlier_calls_is_used_again(patched):
    """Blocks that hold nothing worth keeping are written again before untouched memory is."""
    model, engine = patched(prefix_caching=False)
    touched = set()
    scheduler = None
    for seed in range(6):
        prompts = random_prompts((20, 50), seed=seed)
        with after_each_step(
            engine, lambda: [list(r.blocks) for r in workspace_of(engine).scheduler.requests.values()]
        ) as tables:
            model.generate(**left_padded(prompts), max_new_tokens=5, **GREEDY)
        assert scheduler in (None, workspace_of(engine).scheduler)
        scheduler = workspace_of(engine).scheduler
        touched |= {block for step in tables for table in step for block in table}
    assert len(touched) <= blocks_for(25) + blocks_for(55)


PEAK_OF_A_CALL = textwrap.dedent(
    """
    import json, sys
    import torch
    from batches import left_padded, random_prompts
    from families import build_tiny
    import hfpaged

    def status(field):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

    torch.set_num_threads(1)
    shape = {"num_hidden_layers": 8, "num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 64}
    model = build_tiny("llama", max_position_embeddings=2048, **shape)
    model.set_attn_implementation("sdpa")
    if sys.argv[1] == "paged":
        model.patch(tier="modules")
    options = {"do_sample": False, "eos_token_id": -1}
    model.generate(**left_padded(random_prompts((9, 5))), max_new_tokens=3, **options)
    prompts = random_prompts([900, 100, 700, 30, 300, 500, 640, 20] * 2, seed=3)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts over
    before = status("VmRSS")
    model.generate(**left_padded(prompts), max_new_tokens=24, **options)
    block = 16 * 8 * 8 * (64 + 64) * 4
    print(json.dumps({"extra": status("VmHWM") - before, "rows": len(prompts), "block": block}))
    """
)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_of_a_call_stays_below_padded_generates():
    def measure(kind):
        done = subprocess.run(
            [sys.executable, "-c", PEAK_OF_A_CALL, kind],
            env=with_import_paths(),
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return json.loads(done.stdout.splitlines()[-1])

    stock, paged = measure("stock"), measure("paged")
    print(f"extra resident memory: stock {stock['extra'] >> 20} MiB, paged {paged['extra'] >> 20} MiB")
    assert paged["extra"] <= stock["extra"] + paged["rows"] * paged["block"]
