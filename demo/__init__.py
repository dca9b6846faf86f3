"""Demonstrations of hfpaged. Installed as `hfpaged.demo`."""
