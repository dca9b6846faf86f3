"""Guessing several tokens ahead, to be verified together in one step."""
