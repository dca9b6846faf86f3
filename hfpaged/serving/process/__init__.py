"""The engine's process: its messages, its loop, and the client that starts it and talks to it."""
