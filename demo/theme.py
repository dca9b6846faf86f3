"""How the demo looks: a Gradio theme with fonts that Gradio brings along, so that nothing is fetched from elsewhere."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

STYLE_SHEET = Path(__file__).with_name("style.css")


def build_theme() -> gr.themes.Base:
    """Quiet surfaces and one accent; the colours belong to the block map."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.indigo,
        secondary_hue=gr.themes.colors.indigo,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_lg,
        # The semi-bold cut that Gradio brings along, its default, lacks most letters.
        font=[gr.themes.LocalFont("IBM Plex Sans", weights=(400, 700)), "ui-sans-serif", "system-ui", "sans-serif"],
    ).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="#0d1117",
        background_fill_primary="white",
        background_fill_primary_dark="#151b23",
        background_fill_secondary="*neutral_50",
        background_fill_secondary_dark="#0d1117",
        block_background_fill="white",
        block_background_fill_dark="#151b23",
        block_border_color="*neutral_200",
        block_border_color_dark="#2a323d",
        border_color_primary="*neutral_200",
        border_color_primary_dark="#2a323d",
        block_label_text_color="*neutral_600",
        block_shadow="none",
        input_background_fill="*neutral_50",
        input_background_fill_dark="#0d1117",
        input_border_width="1px",
        input_border_width_dark="1px",
        input_border_color="*neutral_200",
        input_border_color_dark="#2a323d",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_dark="*primary_500",
        button_primary_text_color="white",
    )
