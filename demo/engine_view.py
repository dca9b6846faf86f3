"""The live picture of the engine, as HTML: numbers, block map, rate and requests, each with a line that explains it."""

from __future__ import annotations

from html import escape

from hfpaged.core.snapshot import BooksSnapshot, RequestSnapshot
from hfpaged.demo.block_map import block_map, owner_slot
from hfpaged.demo.rate_chart import rate_chart
from hfpaged.runtime.stats import EngineSnapshot

MOST_ROWS = 8
_STATES = {
    "running": "running",
    "waiting": "waiting",
    "parked": "waits for a shared prefix",
    "forking": "waits for its twin's prompt",
    "idle": "waits for its next token",
}
_TERMS = (
    ("KV cache", "keys and values of every token read or written so far, which attention looks back at."),
    ("Block", "a piece of the KV cache for a few tokens. Requests take blocks one by one as they grow."),
    ("Block table", "the list of blocks that a request holds, in order; they may lie anywhere."),
    ("Continuous batching", "a request joins the batch at the next step and leaves when it is done."),
    ("Prefix cache", "full blocks are found again by their tokens, so a repeated beginning is not computed again."),
    ("Chunked prefill", "a long prompt is read a few hundred tokens a step, so the others keep writing."),
    ("Preemption", "when the pool is full, one request gives its blocks back and goes on later."),
)


def engine_view(seen: EngineSnapshot, rates: list[float]) -> str:
    """The whole panel.

    Args:
        rates: generated tokens in each of the last seconds.
    """
    books = max(seen.books, key=lambda one: one.num_requests, default=None)
    parts = [_tiles(seen, rates[-1])]
    if books is not None:
        parts += [_map_card(books), _requests_card(seen.books)]
    parts.insert(2, _card("Tokens a second", "all visitors together, over the last minute", rate_chart(rates)))
    parts.append(_terms())
    return f'<div class="hp hp-engine">{"".join(parts)}</div>'


def _tiles(seen: EngineSnapshot, rate: float) -> str:
    stats = seen.stats
    prompts, cached = stats["prompt_tokens"], stats["cached_prompt_tokens"]
    share = f"{100 * cached / prompts:.0f}<small> %</small>" if prompts else "–"
    preemptions = stats["preemptions_swap"] + stats["preemptions_recompute"]
    tiles = (
        ("Running", f"{stats['running']:,}", "requests in the batch"),
        ("Waiting", f"{stats['waiting']:,}", f"for room; {preemptions:,} ever preempted"),
        ("Tokens/s", f"{rate:,.0f}", "written now, all together"),
        ("Prefix hits", share, f"{cached:,} of {prompts:,} prompt tokens not computed again"),
    )
    cells = "".join(
        f'<div class="hp-tile"><dt>{name}</dt><dd>{value}</dd><p>{line}</p></div>' for name, value, line in tiles
    )
    return f'<dl class="hp-tiles">{cells}</dl>'


def _map_card(books: BooksSnapshot) -> str:
    count = len(books.references)
    of_all = "" if count == books.num_blocks else f"the first {count:,} of "
    held = sum(references > 0 for references in books.references)
    legend = "".join(
        f'<li><svg viewBox="0 0 8 8" aria-hidden="true"><path class="free" d="M0 0h8v8h-8z"/>'
        f'<path class="{look}" d="M0 0h8v8h-8z"/>{extra}</svg>{text}</li>'
        for look, extra, text in (
            ("held owner-0", "", "held, one colour a request"),
            ("held owner-0", '<path class="shared" d="M3 3h2v2h-2z"/>', "shared by several"),
            ("kept", "", "cached, free to take"),
            ("free", "", "free"),
        )
    )
    return _card(
        "KV blocks",
        f"{of_all}{books.num_blocks:,} blocks of {books.block_size} tokens, {held:,} held",
        f'{block_map(books)}<ul class="hp-legend">{legend}</ul>',
    )


def _requests_card(all_books: tuple[BooksSnapshot, ...]) -> str:
    requests = [request for books in all_books for request in books.requests]
    total = sum(books.num_requests for books in all_books)
    block_size = all_books[0].block_size
    rows = "".join(_request_row(request, block_size) for request in requests[:MOST_ROWS])
    if not rows:
        rows = '<li class="hp-none">Nothing runs. Ask something, or start a comparison.</li>'
    if total > MOST_ROWS:
        rows += f'<li class="hp-none">and {total - MOST_ROWS} more</li>'
    return _card("Requests", "how far each is between its first token and its longest length", f"<ol>{rows}</ol>")


def _request_row(request: RequestSnapshot, block_size: int) -> str:
    width = 100 / max(1, request.max_tokens)
    read = min(request.num_computed, request.prompt_len) * width
    written = (request.num_tokens - request.prompt_len) * width
    blocks = "swapped out" if request.swapped else f"{-(-request.num_computed // block_size)} blocks"
    return (
        f'<li class="owner-{owner_slot(request.id)}"><span class="hp-who"><i></i>#{request.id}</span>'
        f'<span class="hp-bar"><b style="width:{read:.1f}%"></b><em style="width:{written:.1f}%"></em></span>'
        f'<span class="hp-what">{escape(_STATES[request.state])} · {request.prompt_len:,} prompt'
        f" + {request.num_tokens - request.prompt_len:,} new · {blocks}</span></li>"
    )


def _terms() -> str:
    terms = "".join(f"<div><dt>{term}</dt><dd>{line}</dd></div>" for term, line in _TERMS)
    return f'<details class="hp-card hp-terms"><summary>What the words mean</summary><dl>{terms}</dl></details>'


def _card(title: str, line: str, content: str) -> str:
    return f'<section class="hp-card"><h3>{title}</h3><p>{line}</p>{content}</section>'
