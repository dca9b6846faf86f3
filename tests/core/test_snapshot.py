"""What a snapshot says about blocks and requests."""

from __future__ import annotations

from books import make_books, make_request, run_step

from hfpaged.core.snapshot import snapshot

PREFIX = list(range(8))


def test_it_tells_owners_shared_and_cached_blocks():
    books = make_books(num_blocks=16, block_size=4, max_requests=8)
    for request_id in (0, 1):
        books.add(make_request(request_id, [*PREFIX, 90 + request_id]))
    for _ in range(4):
        run_step(books)
    seen = snapshot(books, max_blocks=16, max_requests=8)
    first, second = seen.requests
    assert (first.id, first.state, first.prompt_len) == (0, "running", 9)
    assert first.num_tokens == first.num_computed + 1
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert [seen.references[block] for block in first.blocks[:3]] == [2, 2, 1]
    assert [seen.cached[block] for block in first.blocks[:2]] == [1, 1]
    assert sum(count > 0 for count in seen.references) == books.pool.num_blocks - books.pool.num_free


def test_cached_blocks_of_finished_requests_have_no_owner():
    books = make_books(num_blocks=16, block_size=4)
    books.add(make_request(0, PREFIX))
    run_step(books)
    run_step(books)
    books.finish(0)
    seen = snapshot(books, max_blocks=16, max_requests=8)
    assert seen.requests == () and seen.num_requests == 0
    assert set(seen.references) == {0}
    assert sum(seen.cached) == 2


def test_it_is_bounded_and_running_requests_come_first():
    books = make_books(num_blocks=64, block_size=4, max_batch_tokens=8, max_requests=2)
    for request_id in range(6):
        books.add(make_request(request_id, [request_id * 10 + at for at in range(6)], priority=-request_id))
    run_step(books)
    books.add(make_request(9, [7], priority=-100))
    seen = snapshot(books, max_blocks=1, max_requests=3)
    assert (seen.num_blocks, len(seen.references), len(seen.cached)) == (64, 1, 1)
    assert seen.num_requests == 7
    assert [(request.id, request.state) for request in seen.requests] == [
        (5, "running"), (4, "running"), (9, "waiting")
    ]  # fmt: skip
    assert sum(len(request.blocks) for request in seen.requests) == 1
