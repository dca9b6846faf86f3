"""The books: which request holds which blocks and computes which tokens next. Pure Python, without torch."""
