"""Turning logits into tokens: compiled logits processors, seeded sampling, stopping rules."""
