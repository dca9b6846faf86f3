"""Chat messages to prompt text, and generated text to tool calls."""
