"""The chat tab. Everyone's answers grow in the same steps of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import gradio as gr

from hfpaged.demo.answer import Answer, Progress, Sampling
from hfpaged.demo.failure import failure_of
from hfpaged.demo.host import Host, Message
from hfpaged.demo.transcript import ANSWER, THOUGHT, TOOL_CALL, TOOL_RESULT, Step

LONGEST_MESSAGE = 16_000
STARTERS = (
    "Explain to a child why the sky is blue.",
    "Write four lines about a lighthouse in fog.",
    "List three things to pack for a rainy day.",
)
_PLACEHOLDER = (
    "<center><h3>Ask something</h3>Open this page in a second window, too: both answers come out of one batch.</center>"
)
_TITLES = {THOUGHT: "Thought", TOOL_CALL: "Calls a tool", TOOL_RESULT: "Result"}


def build_chat(host: Host) -> None:
    """Lay out the tab and wire its events. To be called inside a `gr.Blocks`."""
    memory = gr.State([])
    chatbot, status, box = _build_conversation()
    system, use_tools, sliders, clear = _build_settings(host)
    reply = _make_reply(host)

    def stop(request: gr.Request) -> None:
        host.visitors.stop(request.session_hash)

    inputs = [box, chatbot, memory, system, use_tools, *sliders]
    outputs = [chatbot, memory, status, box]
    for_everyone = {"concurrency_limit": host.max_users, "concurrency_id": "answers", "show_progress": "hidden"}
    box.submit(reply, inputs, outputs, api_visibility="private", **for_everyone)
    chatbot.example_select(_text_of_example, None, box, api_visibility="private", show_progress="hidden").then(
        reply, inputs, outputs, api_visibility="private", **for_everyone
    )
    box.stop(stop, queue=False, api_visibility="private", show_progress="hidden")
    for event in (clear.click, chatbot.clear):
        event(stop, queue=False, api_visibility="private", show_progress="hidden").then(
            lambda: ([], [], _status_line("A new conversation."), _idle()),
            outputs=outputs,
            queue=False,
            api_visibility="private",
            show_progress="hidden",
        )


def _make_reply(host: Host) -> Callable[..., AsyncIterator[tuple[Any, ...]]]:
    """What answers a message: updates of the conversation, of what is remembered of it, of the status and the box."""

    async def reply(
        request: gr.Request,
        question: str | None,
        shown: list[Any],
        remembered: list[Message],
        system: str | None,
        use_tools: bool,
        *sampling: float,
    ) -> AsyncIterator[tuple[Any, ...]]:
        if not (question or "").strip():
            yield gr.skip(), gr.skip(), gr.skip(), gr.skip()
            return
        asked = [{"role": "user", "content": question}]
        shown = [*shown, *asked]
        yield shown, remembered, _status_line("Waiting for the first token"), _stoppable()
        first = [{"role": "system", "content": system}] if (system or "").strip() else []
        answer = Answer(host, [*first, *remembered, *asked], Sampling(*sampling), use_tools)
        with host.visitors.serving(request.session_hash) as scope:
            try:
                async for progress in answer.stream(scope):
                    now_remembered = [*remembered, *asked, *progress.written]
                    yield [*shown, *_as_messages(progress)], now_remembered, _status_line(_numbers(progress)), gr.skip()
            except Exception as error:
                yield shown[:-1], remembered, _status_line("Nothing was sent."), _idle(question)
                raise failure_of(error) from error
        yield gr.skip(), gr.skip(), gr.skip(), _idle()

    return reply


def _build_conversation() -> tuple[gr.Chatbot, gr.HTML, gr.Textbox]:
    chatbot = gr.Chatbot(
        elem_id="chat",
        label="Conversation",
        show_label=False,
        height="min(58vh, 620px)",
        layout="bubble",
        allow_tags=False,
        buttons=["copy"],
        feedback_options=None,
        placeholder=_PLACEHOLDER,
        examples=[{"text": text} for text in STARTERS],
    )
    status = gr.HTML(_status_line("Everyone who has this page open shares one model, one batch and one cache."))
    box = gr.Textbox(
        elem_id="message",
        show_label=False,
        placeholder="Message",
        lines=1,
        max_lines=6,
        max_length=LONGEST_MESSAGE,
        submit_btn=True,
        autofocus=True,
        container=False,
    )
    return chatbot, status, box


def _build_settings(host: Host) -> tuple[gr.Textbox, gr.Checkbox, list[gr.Component], gr.Button]:
    defaults = Sampling()
    most = max(16, min(4096, host.max_tokens // 2))
    with gr.Row(elem_classes="hp-under-chat"):
        clear = gr.Button("New conversation", size="sm", variant="secondary", scale=0, min_width=160)
    with gr.Accordion("Sampling and instructions", open=False):
        with gr.Row():
            sliders = [
                _slider(8, most, min(most, defaults.max_new_tokens), 8, "New tokens", "at most, an answer"),
                _slider(0, 2, 0.3, 0.05, "Temperature", "0 always takes the likeliest token"),
                _slider(0.05, 1, 0.95, 0.05, "Top p", "only the likeliest tokens of this share"),
                _slider(0, 200, 50, 1, "Top k", "only this many tokens; 0 is all"),
                _slider(1, 2, 1.1, 0.05, "Repetition penalty", "above 1, fewer words come again"),
                gr.Number(-1, precision=0, label="Seed", info="-1 is another one each time", min_width=230),
            ]
        system = gr.Textbox(
            label="System message", info="what the model is told first", lines=2, max_length=LONGEST_MESSAGE
        )
        use_tools = gr.Checkbox(
            label="Let it use a calculator",
            info="if the model asks for it" if host.takes_tools else "this model's chat template takes no tools",
            interactive=host.takes_tools,
        )
    return system, use_tools, sliders, clear


def _slider(least: float, most: float, value: float, step: float, label: str, info: str) -> gr.Slider:
    return gr.Slider(least, most, value, step=step, label=label, info=info, min_width=230)


def _as_messages(progress: Progress) -> list[dict[str, Any]]:
    """The steps as the chat shows them: thoughts and tools folded, the answer plain."""
    messages = [_as_message(step) for step in progress.steps]
    if not messages and progress.finish_reason is not None:
        messages = [{"role": "assistant", "content": "*(an empty answer)*"}]
    return messages


def _as_message(step: Step) -> dict[str, Any]:
    if step.kind == ANSWER:
        return {"role": "assistant", "content": step.text}
    content = f"```json\n{step.text.strip()}\n```" if step.kind == TOOL_CALL else step.text.strip()
    metadata = {"title": _TITLES[step.kind], "status": "done" if step.done else "pending"}
    return {"role": "assistant", "content": content, "metadata": metadata}


def _numbers(progress: Progress) -> str:
    """The line under the chat."""
    parts = [f"{progress.prompt_tokens:,} prompt tokens", f"<b>{progress.new_tokens:,}</b> new"]
    if progress.first_token_seconds is not None:
        parts.append(f"first after <b>{progress.first_token_seconds:.2f} s</b>")
    if progress.tokens_per_second:
        parts.append(f"<b>{progress.tokens_per_second:.1f}</b> tokens/s")
    if progress.left_out:
        parts.append(f"the oldest {progress.left_out} messages did not fit")
    ends = {"cancelled": "stopped, its blocks are free", "length": "cut at the longest length", "stop": "finished"}
    if progress.finish_reason is not None:
        parts.append(ends.get(progress.finish_reason, progress.finish_reason))
    return " · ".join(parts)


def _status_line(html: str) -> str:
    return f'<p class="hp-status" role="status">{html}</p>'


def _stoppable() -> dict[str, Any]:
    return gr.update(value="", submit_btn=False, stop_btn=True)


def _idle(text: str = "") -> dict[str, Any]:
    return gr.update(submit_btn=True, stop_btn=False, **({"value": text} if text else {}))


def _text_of_example(chosen: gr.SelectData) -> str:
    return chosen.value["text"]
