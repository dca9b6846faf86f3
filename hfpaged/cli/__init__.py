"""The `hfpaged` command: one module per subcommand."""
