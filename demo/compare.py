"""The compare tab: the same prompts with the engine and without it, side by side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import gradio as gr

from hfpaged.demo.comparison import AS_BATCH, MOST_PROMPTS, ONE_BY_ONE, Comparison
from hfpaged.demo.comparison_view import comparison_view
from hfpaged.demo.failure import failure_of
from hfpaged.demo.host import Host

LONGEST_INPUT = 16_000
SHARED = (
    "Rules of the Gull Rock boathouse. Boats go out only with two people and two life jackets. The red boats are for "
    "members, the blue ones for guests. Nobody rows beyond the reef after four in the afternoon, because the current "
    "turns then. Oars are rinsed with fresh water and hung up, blades down. Whoever finds a leak ties a yellow ribbon "
    "to the bow. The key hangs behind the clock; the kettle is for everybody."
)
PROMPTS = (
    "Which boats may a guest take?",
    "Why must nobody row beyond the reef late in the day?",
    "What do I do with the oars when I come back?",
    "I found a leak. What now?",
    "May I go out alone if I wear two life jackets?",
    "Write a friendly note for the door that sums up these rules.",
)
_NOTHING_YET = (
    '<div class="hp"><p class="hp-hint">The prompts run on the engine first, all at once, then on stock '
    "<code>generate()</code> with the same weights. Both are greedy; a tick says that they gave the same tokens."
    "</p></div>"
)


def build_compare(host: Host) -> None:
    """Lay out the tab and wire its events. To be called inside a `gr.Blocks`."""
    shared, prompts = _build_texts()
    new_tokens, mode, go, halt = _build_controls()
    result = gr.HTML(_NOTHING_YET, elem_id="comparison")

    def stop(request: gr.Request) -> None:
        host.visitors.stop(request.session_hash)

    # One at a time: two stock runs beside each other would only measure each other.
    go.click(
        _make_compare(host),
        [shared, prompts, new_tokens, mode],
        [result, go, halt],
        concurrency_limit=1,
        api_visibility="private",
        show_progress="minimal",
    )
    halt.click(stop, queue=False, api_visibility="private", show_progress="hidden")


def _build_texts() -> tuple[gr.Textbox, gr.Textbox]:
    with gr.Row():
        shared = gr.Textbox(
            SHARED,
            label="Shared beginning",
            info="goes before every prompt; the engine computes it once and shares its blocks",
            lines=5,
            max_lines=8,
            max_length=LONGEST_INPUT,
            min_width=300,
            elem_id="shared",
        )
        prompts = gr.Textbox(
            "\n".join(PROMPTS),
            label="Prompts",
            info=f"one a line, at most {MOST_PROMPTS}",
            lines=5,
            max_lines=8,
            max_length=LONGEST_INPUT,
            min_width=300,
            elem_id="prompts",
        )
    return shared, prompts


def _build_controls() -> tuple[gr.Slider, gr.Radio, gr.Button, gr.Button]:
    with gr.Row(elem_classes="hp-compare-controls"):
        new_tokens = gr.Slider(
            8, 256, 48, step=8, label="New tokens", info="at most, for each prompt", min_width=220, elem_id="new-tokens"
        )
        mode = gr.Radio(
            [ONE_BY_ONE, AS_BATCH], value=ONE_BY_ONE, label="Stock runs them", min_width=220, elem_id="stock-mode"
        )
        with gr.Column(min_width=140, scale=0, elem_classes="hp-actions"):
            go = gr.Button("Compare", variant="primary", size="md", elem_id="compare")
            halt = gr.Button("Stop", variant="secondary", size="md", interactive=False, elem_id="halt")
    return new_tokens, mode, go, halt


def _make_compare(host: Host) -> Callable[..., AsyncIterator[tuple[Any, ...]]]:
    """What runs a comparison: updates of the result and of both buttons."""

    async def compare(
        shared: str | None, prompts: str | None, new_tokens: int, mode: str, request: gr.Request
    ) -> AsyncIterator[tuple[Any, ...]]:
        try:
            lines = [line.strip() for line in (prompts or "").splitlines() if line.strip()]
            comparison = Comparison(host, lines, shared or "", int(new_tokens), mode)
            yield comparison_view(comparison), *_buttons(running=True)
            with host.visitors.serving(request.session_hash) as scope:
                async for seen in comparison.run(scope):
                    yield comparison_view(seen), gr.skip(), gr.skip()
        except Exception as error:
            yield gr.skip(), *_buttons(running=False)
            raise failure_of(error) from error
        yield gr.skip(), *_buttons(running=False)

    return compare


def _buttons(running: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    return gr.update(interactive=not running), gr.update(interactive=running)
