"""The scheduler: order, budgets, sharing, preemption. Each plan is executed on a model of the memory."""

import time

import pytest
from books import Memory, make_books, make_request, run_step, run_to_end, sample_of

from hfpaged.core.invariants import check
from hfpaged.core.request import RequestState
from hfpaged.errors import InvariantError, RequestTooLargeError


def test_a_request_computes_its_prompt_then_one_token_a_step():
    books = make_books()
    books.add(make_request(1, range(10), max_tokens=13))
    sizes = []
    memory = Memory(books)
    while (plan := run_step(books, memory)) is not None:
        sizes.append(sum(entry.num_tokens for entry in plan.entries))
    assert sizes == [10, 1, 1]
    assert books.pool.num_free == books.pool.num_blocks


def test_prompts_are_chunked_and_mixed_with_decodes_under_the_budget():
    books = make_books(num_blocks=32, max_batch_tokens=6)
    books.add(make_request(1, range(4), max_tokens=20))
    books.add(make_request(2, range(50, 70), max_tokens=21))
    plans = [run_step(books) for _ in range(3)]
    assert [(entry.id, entry.num_tokens) for entry in plans[0].entries] == [(1, 4), (2, 2)]
    assert [(entry.id, entry.num_tokens) for entry in plans[1].entries] == [(1, 1), (2, 5)]
    assert plans[1].entries[1].samples == ()
    assert plans[1].entries[0].samples == (1,)


def test_lower_priority_number_runs_first():
    books = make_books(max_requests=1)
    books.add(make_request(1, range(4), max_tokens=5, priority=1))
    books.add(make_request(2, range(4), max_tokens=5, priority=0))
    assert run_step(books).entries[0].id == 2


def test_a_request_that_can_never_fit_is_refused_with_both_numbers():
    books = make_books(num_blocks=4, block_size=4)
    with pytest.raises(RequestTooLargeError) as refused:
        books.add(make_request(1, range(10), max_tokens=17))
    assert (refused.value.needed, refused.value.available) == (5, 4)
    books.add(make_request(2, range(10), max_tokens=16))
    run_to_end(books)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_a_repeated_prompt_shares_all_full_blocks_but_computes_its_last_token(length):
    books = make_books(num_blocks=32)
    memory = Memory(books)
    for request_id in (1, 2):
        books.add(make_request(request_id, range(length), max_tokens=length + 1))
        run_to_end(books, memory)
    assert books.counters.cached_prompt_tokens == (length - 1) // 4 * 4


def test_requests_added_together_hold_and_compute_a_common_prefix_once():
    books = make_books(num_blocks=200, block_size=16, max_batch_tokens=512, max_requests=64)
    prefix = list(range(1000))
    memory = Memory(books)
    for request_id in range(64):
        books.add(make_request(request_id, [*prefix, 5000 + request_id], max_tokens=1003))
    computed = 0
    most_held = 0
    while (plan := run_step(books, memory if computed < 1100 else None)) is not None:
        computed += sum(entry.num_tokens for entry in plan.entries)
        most_held = max(most_held, books.pool.num_blocks - books.pool.num_free)
    assert most_held <= 62 + 64
    # 1,001 tokens of the first, 9 beyond the shared blocks of each other, and a decode each.
    assert computed == 1001 + 63 * 9 + 64
    assert books.counters.cached_prompt_tokens == 63 * 62 * 16


def test_forks_hold_the_prompt_once_and_copy_the_partial_block_when_they_write():
    books = make_books(num_blocks=64, block_size=4, max_requests=32)
    memory = Memory(books)
    for request_id in range(16):
        books.add(make_request(request_id, range(10), max_tokens=13), fork_of=None if request_id == 0 else 0)
    first = run_step(books, memory)
    assert [entry.num_tokens for entry in first.entries] == [10]
    assert first.entries[0].samples == tuple(range(16))
    assert books.pool.num_blocks - books.pool.num_free == 3
    second = run_step(books, memory)
    assert len(second.copies) == 15
    assert books.pool.num_blocks - books.pool.num_free == 2 + 16
    run_to_end(books, memory)


def test_forks_without_a_free_slot_wait_holding_the_shared_blocks():
    books = make_books(num_blocks=64, max_requests=2)
    memory = Memory(books)
    for request_id in range(5):
        books.add(make_request(request_id, range(10), max_tokens=14), fork_of=None if request_id == 0 else 0)
    run_step(books, memory)
    assert len(books.running) == 2
    assert [len(request.blocks) for request in books.waiting] == [3, 3, 3]
    run_to_end(books, memory)


@pytest.mark.parametrize("when", ["before", "during"])
def test_when_a_parent_leaves_early_its_first_child_takes_over(when):
    books = make_books(max_batch_tokens=4)
    memory = Memory(books)
    for request_id in range(3):
        books.add(make_request(request_id, range(10), max_tokens=12), fork_of=None if request_id == 0 else 0)
    if when == "during":
        run_step(books, memory)
    books.finish(0)
    check(books)
    run_to_end(books, memory)
    assert books.counters.generated_tokens == 4


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_memory_pressure_preempts_the_newest_and_everybody_finishes(preemption):
    books = make_books(num_blocks=8, preemption=preemption)
    memory = Memory(books)
    texts = {}
    for request_id in range(4):
        request = make_request(request_id, range(request_id * 10, request_id * 10 + 6), max_tokens=24, cache_root=None)
        texts[request_id] = request.tokens
        books.add(request)
    run_to_end(books, memory)
    counters = books.counters
    assert counters.preemptions_swap + counters.preemptions_recompute > 0
    if preemption != "auto":
        assert (counters.preemptions_swap > 0) == (preemption == "swap")
    alone = {}
    for request_id, text in texts.items():
        books = make_books(num_blocks=8)
        request = make_request(request_id, text[:6], max_tokens=24)
        books.add(request)
        run_to_end(books)
        alone[request_id] = request.tokens
    assert texts == alone


def test_a_full_block_store_means_recompute():
    books = make_books(num_blocks=8, preemption="swap", can_store=lambda count: False)
    for request_id in range(3):
        books.add(make_request(request_id, range(6), max_tokens=24, cache_root=None))
    run_to_end(books, Memory(books))
    assert books.counters.preemptions_recompute > 0
    assert books.counters.preemptions_swap == 0


def test_an_aborted_plan_changes_nothing_and_is_made_again():
    books = make_books(num_blocks=32)
    for request_id in range(4):
        books.add(make_request(request_id, range(9), max_tokens=20), fork_of=0 if request_id == 3 else None)
    for _ in range(30):
        plan = books.plan()
        if plan is None:
            break
        books.abort(plan)
        check(books)
        again = books.plan()
        assert [entry[:4] for entry in again.entries] == [entry[:4] for entry in plan.entries]
        books.commit(again, sample_of(books, again))
        for request in list(books.requests.values()):
            if len(request.tokens) >= request.max_tokens:
                books.finish(request.id)


def test_what_an_aborted_plan_may_have_overwritten_is_not_used_again():
    books = make_books(num_blocks=4)
    memory = Memory(books)
    books.add(make_request(1, range(9), max_tokens=10))
    run_to_end(books, memory)
    assert books.pool.num_cached == 2
    for request_id in (2, 3):
        books.add(make_request(request_id, range(20, 27), max_tokens=16))
    while not (plan := books.plan()).recomputed and not plan.stores:
        memory.execute(plan)
        books.commit(plan, sample_of(books, plan))
    memory.execute(plan)
    books.abort(plan)
    check(books)
    books.add(make_request(4, range(9), max_tokens=10))
    run_to_end(books, memory)


def test_only_the_plan_that_is_out_can_be_committed():
    books = make_books()
    books.add(make_request(1, range(4)))
    plan = books.plan()
    with pytest.raises(InvariantError):
        books.plan()
    books.abort(plan)
    with pytest.raises(InvariantError):
        books.commit(plan, {1: 3})


def test_a_steered_request_idles_until_it_is_given_tokens_and_others_go_on():
    books = make_books()
    memory = Memory(books)
    books.add(make_request(1, range(5), max_tokens=12))
    books.add(make_request(2, range(20, 25), max_tokens=9))
    run_step(books, memory, steered={1})
    assert books.requests[1].state is RequestState.IDLE
    assert [entry.id for entry in run_step(books, memory).entries] == [2]
    books.append_tokens(1, [40, 41, 42], logits_for=3)
    plan = run_step(books, memory, steered={1})
    entry = next(entry for entry in plan.entries if entry.id == 1)
    assert (entry.num_tokens, entry.logits_for, entry.samples) == (3, 3, (1,))


def test_rollback_gives_slots_back_and_never_overwrites_a_cached_block():
    books = make_books()
    memory = Memory(books)
    books.add(make_request(1, range(8), max_tokens=30))
    run_step(books, memory, steered={1})
    books.append_tokens(1, [9, 9, 9, 9, 9])
    run_step(books, memory, steered={1})
    books.rollback(1, 7)
    check(books)
    assert len(books.requests[1].blocks) == 2
    books.append_tokens(1, [8, 8, 8])
    plan = run_step(books, memory, steered={1})
    assert len(plan.copies) == 1


def test_rejected_drafts_are_forgotten_and_never_cached():
    books = make_books()
    memory = Memory(books)
    books.add(make_request(1, range(6), max_tokens=30))
    run_step(books, memory, steered={1})
    books.append_tokens(1, [30, 31, 32, 33], logits_for=4)
    plan = books.plan()
    memory.execute(plan)
    books.commit(plan, {1: 44}, accepted={1: 1})
    check(books)
    assert books.requests[1].tokens == [*range(6), 30, 31, 44]
    assert books.pool.num_cached == 1
    run_step(books, memory, steered={1})
    assert books.pool.num_cached == 2


@pytest.mark.parametrize("budget", [3, 4, 5, 7])
def test_tokens_whose_logits_are_needed_together_are_never_parted(budget):
    books = make_books(max_batch_tokens=budget)
    memory = Memory(books)
    books.add(make_request(1, range(6), max_tokens=30))
    for request_id, count in ((1, 6), (2, 7)):
        if request_id == 2:
            books.add(make_request(2, range(20, 27), max_tokens=30, draft_tokens=3))
        while books.requests[request_id].computed < count:
            run_step(books, memory, steered={1, 2})
    books.append_tokens(1, [30, 31, 32, 33], logits_for=4)
    books.append_tokens(2, [40, 41, 42, 43, 44], logits_for=4)
    entries = []
    while any(request.num_uncomputed for request in books.requests.values()):
        plan = run_step(books, memory, steered={1, 2})
        entries += plan.entries
        assert sum(entry.num_tokens for entry in plan.entries) <= max(budget, 4)
    assert [entry.logits_for for entry in entries if entry.samples] == [4, 4]
    assert all(entry.num_tokens >= entry.logits_for for entry in entries)


def test_a_long_prompt_leaves_room_for_those_that_came_later():
    books = make_books(num_blocks=600, max_batch_tokens=16)
    memory = Memory(books)
    books.add(make_request(1, range(1000), max_tokens=1010))
    assert [entry.num_tokens for entry in run_step(books, memory).entries] == [16]
    books.add(make_request(2, range(2000, 2006)))
    books.add(make_request(3, range(3000, 3100)))
    plan = run_step(books, memory)
    assert [(entry.id, entry.num_tokens) for entry in plan.entries] == [(1, 8), (2, 6), (3, 2)]
    assert books.requests[2].tokens[6:]  # its first token is there in the step after it came
    plan = run_step(books, memory)
    assert [(entry.id, entry.num_tokens) for entry in plan.entries] == [(1, 8), (2, 1), (3, 7)]
    books.finish(2)
    books.finish(3)
    assert [entry.num_tokens for entry in run_step(books, memory).entries] == [16]


def test_tokens_whose_logits_are_needed_are_not_taken_from_the_cache():
    books = make_books()
    memory = Memory(books)
    books.add(make_request(1, range(13), max_tokens=30))
    run_step(books, memory, steered={1})
    books.add(make_request(2, range(13), max_tokens=30, draft_tokens=6))
    entry = run_step(books, memory, steered={2}).entries[0]
    assert (entry.start, entry.num_tokens, entry.logits_for) == (4, 9, 7)


def test_forked_idle_requests_share_until_they_write():
    books = make_books()
    memory = Memory(books)
    books.add(make_request(1, range(6), max_tokens=30))
    run_step(books, memory, steered={1})
    child = make_request(2, range(6), max_tokens=30)
    books.fork(1, child)
    check(books)
    assert child.blocks == books.requests[1].blocks
    books.append_tokens(1, [7])
    books.append_tokens(2, [8])
    plan = run_step(books, memory, steered={1, 2})
    assert len(plan.copies) == 1


def test_requests_that_wait_for_each_other_share_a_pool_too_small_for_all():
    books = make_books(num_blocks=4, max_requests=8)
    memory = Memory(books)
    ids = set(range(4))
    for request_id in ids:
        books.add(make_request(request_id, range(request_id, request_id + 6), max_tokens=8, cache_root=None))
    for _ in range(2):
        waiting = set(ids)
        for _ in range(20):
            plan = run_step(books, memory, steered=ids)
            if plan is None:
                break
            waiting -= {request_id for entry in plan.entries for request_id in entry.samples}
        assert not waiting
        for request_id in ids:
            books.append_tokens(request_id, [3])
    assert books.counters.preemptions_swap + books.counters.preemptions_recompute > 0


def test_reset_keeps_old_content_out_of_the_cache():
    books = make_books(num_blocks=32)
    memory = Memory(books)
    books.add(make_request(1, range(12), max_tokens=30))
    run_step(books, memory)
    books.reset_prefix_cache()
    run_to_end(books, memory)
    assert books.pool.num_cached == 0


def test_blocks_of_a_forgotten_cache_are_used_again_before_those_that_nobody_used_yet():
    books = make_books(num_blocks=32, block_size=4)
    for request_id in (1, 2):
        books.add(make_request(request_id, range(20), max_tokens=22))
        plan = books.plan()
        assert max(plan.entries[0].full_table) < books.pool.blocks_for(22)
        books.commit(plan, sample_of(books, plan))
        run_to_end(books)
        books.reset_prefix_cache()


def test_a_step_does_not_cost_more_with_more_requests_waiting():
    books = make_books(num_blocks=20_000, block_size=16, max_batch_tokens=512, max_requests=256)
    for request_id in range(2256):
        books.add(make_request(request_id, range(request_id, request_id + 32), max_tokens=400))
    while len(books.running) < 256:
        plan = books.plan()
        books.commit(plan, sample_of(books, plan))
    seconds = []
    for _ in range(60):
        # Of this thread, so that whatever else the machine does is not counted.
        began = time.thread_time()
        plan = books.plan()
        planned = time.thread_time()
        sampled = sample_of(books, plan)
        began_commit = time.thread_time()
        books.commit(plan, sampled)
        seconds.append(planned - began + time.thread_time() - began_commit)
    assert len(books.waiting) == 2000
    assert sorted(seconds)[len(seconds) // 2] < 0.002
