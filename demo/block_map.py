"""The block map: one cell for each KV block, in the colour of the request that holds it."""

from __future__ import annotations

from collections.abc import Iterable

from hfpaged.core.snapshot import BooksSnapshot

COLUMNS = 48
# Cells are drawn on a grid of this pitch, in the SVG's own units.
PITCH, SIDE = 10, 8
OWNER_COLOURS = 10


def owner_slot(request_id: int) -> int:
    """Which of the owners' colours a request has."""
    return request_id % OWNER_COLOURS


def block_map(books: BooksSnapshot) -> str:
    """An SVG of the pool. Cells of one look are one path, which keeps thousands of them small."""
    count = len(books.references)
    rows = -(-count // COLUMNS)
    owners = _owners(books)
    by_owner: dict[int, list[int]] = {}
    for block, slot in owners.items():
        by_owner.setdefault(slot, []).append(block)
    held = [block for block in range(count) if books.references[block]]
    shared = [block for block in held if books.references[block] > 1]
    kept = [block for block in range(count) if books.cached[block] and not books.references[block]]
    unknown = [block for block in held if block not in owners]
    layers = [
        _path("free", range(count)),
        _path("kept", kept),
        _path("held", unknown),
        *(_path(f"held owner-{slot}", blocks) for slot, blocks in sorted(by_owner.items())),
        _path("shared", shared, inset=3),
    ]
    label = f"{count} KV blocks: {len(held)} held, {len(shared)} of them shared, {len(kept)} cached and free"
    return (
        f'<svg class="hp-map" role="img" aria-label="{label}" '
        f'viewBox="0 0 {COLUMNS * PITCH - (PITCH - SIDE)} {rows * PITCH}">{"".join(layers)}</svg>'
    )


def _owners(books: BooksSnapshot) -> dict[int, int]:
    """Colour of each held block: that of the first request, in order of service, whose table contains it."""
    owners: dict[int, int] = {}
    for request in books.requests:
        for block in request.blocks:
            owners.setdefault(block, owner_slot(request.id))
    return owners


def _path(look: str, blocks: Iterable[int], inset: int = 0) -> str:
    side = SIDE - 2 * inset
    cells = "".join(
        f"M{block % COLUMNS * PITCH + inset} {block // COLUMNS * PITCH + inset}h{side}v{side}h-{side}z"
        for block in blocks
    )
    return f'<path class="{look}" d="{cells}"/>' if cells else ""
