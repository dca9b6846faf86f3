"""From token ids to text while they arrive."""
