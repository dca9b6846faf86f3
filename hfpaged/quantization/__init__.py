"""Quantized checkpoints: reading their layouts, running them packed, and making them."""
