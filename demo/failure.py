"""failure_of: what a visitor and the console are shown of an error."""

from __future__ import annotations

import gradio as gr

from hfpaged.errors import HfpagedError


def failure_of(error: Exception) -> gr.Error:
    """The message to raise for an error. One that nothing foresaw is printed on the console with its traceback."""
    return gr.Error(str(error) or type(error).__name__, print_exception=not isinstance(error, HfpagedError))
