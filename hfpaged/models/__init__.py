"""Where the default model comes from."""
