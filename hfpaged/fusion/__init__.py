"""Fused operations: what each one replaces, how it rounds, and the guard that decides whether it may run."""
