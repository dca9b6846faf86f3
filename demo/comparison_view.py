"""A comparison as HTML: totals on top, then each prompt with both texts and both clocks."""

from __future__ import annotations

from html import escape

from hfpaged.demo.comparison import Comparison
from hfpaged.demo.lane import Lane, Track


def comparison_view(comparison: Comparison) -> str:
    """The whole result so far."""
    pairs = "".join(_pair(comparison, index) for index in range(len(comparison.prompts)))
    return f'<div class="hp hp-compare">{_totals(comparison)}{pairs}</div>'


def _totals(comparison: Comparison) -> str:
    lanes = (("ours", comparison.ours), ("stock", comparison.stock))
    top = max(lane.tokens_per_second for _, lane in lanes) or 1.0
    bars = "".join(_total(side, lane, lane.tokens_per_second / top) for side, lane in lanes)
    return f'<section class="hp-card hp-totals">{bars}<p class="hp-verdict">{_verdict(comparison)}</p></section>'


def _total(side: str, lane: Lane, share: float) -> str:
    first = lane.mean_first_token_seconds
    numbers = (
        f"{lane.num_tokens:,} tokens in {lane.seconds:.1f} s"
        f"{f', the first after {first:.2f} s on average' if first is not None else ''}"
        if lane.tracks
        else "not begun"
    )
    return (
        f'<div class="hp-total {side}"><div><b>{escape(lane.title)}</b><span>{numbers}</span></div>'
        f'<div class="hp-bar"><b style="width:{100 * share:.1f}%"></b></div>'
        f"<strong>{lane.tokens_per_second:,.0f}<small> tokens/s</small></strong></div>"
    )


def _verdict(comparison: Comparison) -> str:
    if comparison.stopped:
        return "Stopped."
    if not comparison.done:
        return "Running: the engine's side first, then stock's."
    equal = sum(bool(same) for same in comparison.equal)
    ratio = comparison.ours.tokens_per_second / max(1e-9, comparison.stock.tokens_per_second)
    verdict = f"<b>{ratio:.1f} times</b> stock's tokens/s, and {equal} of {len(comparison.equal)} texts are equal."
    if comparison.others:
        verdict += " Others used the engine meanwhile, so the times mean less."
    return verdict


def _pair(comparison: Comparison, index: int) -> str:
    sides = "".join(
        _side(side, lane.tracks[index] if lane.tracks else None)
        for side, lane in (("ours", comparison.ours), ("stock", comparison.stock))
    )
    return (
        f'<section class="hp-card hp-pair"><header><h4>{escape(comparison.prompts[index])}</h4>'
        f'{_tick(comparison.equal[index])}</header><div class="hp-sides">{sides}</div></section>'
    )


def _tick(same: bool | None) -> str:
    if same is None:
        return ""
    if same:
        return '<span class="hp-tick equal">✓ equal texts</span>'
    return '<span class="hp-tick differs">✗ texts differ</span>'


def _side(side: str, track: Track | None) -> str:
    if track is None or track.first_token_seconds is None:
        return f'<div class="{side}"><p class="hp-clock">–</p><p class="hp-text"></p></div>'
    clock = f"first after <b>{track.first_token_seconds:.2f} s</b>, then <b>{track.tokens_per_second:.0f}</b> tokens/s"
    cursor = "" if track.done else '<i class="hp-cursor"></i>'
    return (
        f'<div class="{side}"><p class="hp-clock">{clock}</p>'
        f'<p class="hp-text">{escape(track.text.strip())}{cursor}</p></div>'
    )
