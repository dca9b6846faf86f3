"""Tensors and threads: from a plan of token counts to logits, and the thread that steps."""
