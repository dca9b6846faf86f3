"""An engine in a process of its own, and an OpenAI-compatible server in front of it."""
