"""hfpaged inside other libraries. Installed as `hfpaged.integrations`."""
