"""The page: header, chat and comparison on one side, the live engine on the other."""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from hfpaged.demo.chat import build_chat
from hfpaged.demo.compare import build_compare
from hfpaged.demo.engine_watch import EngineWatch
from hfpaged.demo.host import Host
from hfpaged.demo.theme import STYLE_SHEET, build_theme


def build_page(host: Host) -> gr.Blocks:
    """All of the demo, ready for `launch`."""
    with gr.Blocks(title="hfpaged", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(_header(host))
        with gr.Row(elem_id="hp-main"):
            with gr.Column(scale=3, min_width=340):
                # Named, so that a hot reload finds the selected one again.
                with gr.Tabs(selected="chat"):
                    with gr.Tab("Chat", id="chat"):
                        build_chat(host)
                    with gr.Tab("Compare", id="compare"):
                        build_compare(host)
            with gr.Column(scale=2, min_width=340, elem_id="hp-engine"):
                _build_engine(host)

        def leave(request: gr.Request) -> None:
            host.visitors.stop(request.session_hash)

        page.unload(leave)
    # As many events at once as the engine takes requests into a step; Gradio's own default is one.
    return page.queue(default_concurrency_limit=host.max_users, max_size=8 * host.max_users, api_open=False)


def launch(page: gr.Blocks, address: str, port: int | None, **options: Any) -> None:
    """Serve the page until interrupted. `port` None: the first free one from 7860 on."""
    page.launch(
        server_name=address,
        server_port=port,
        theme=build_theme(),
        css_paths=STYLE_SHEET,
        footer_links=[],
        ssr_mode=False,
        mcp_server=False,
        **options,
    )


def _build_engine(host: Host) -> None:
    watch = EngineWatch(host.engine)
    picture = gr.HTML(elem_id="engine")
    timer = gr.Timer(0.4)

    def look(request: gr.Request) -> tuple[Any, Any]:
        seen = watch.look(request.session_hash)
        return gr.skip() if seen.html is None else seen.html, gr.Timer(seen.seconds)

    timer.tick(look, outputs=[picture, timer], queue=False, show_progress="hidden", api_visibility="private")


def _header(host: Host) -> str:
    stats = host.engine.stats()
    facts = (
        host.label,
        host.dtype,
        f"{stats['tier']} tier",
        f"{stats['backend']} attention",
        f"up to {host.max_users} users in a batch",
    )
    chips = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return (
        '<header class="hp hp-header"><div><h1>hfpaged</h1>'
        "<p>One patched Transformers model, one batch, one cache for everyone on this page.</p></div>"
        f"<ul>{chips}</ul></header>"
    )
