"""`model.generate()` on the engine: which calls it takes, and how rows become requests and outputs."""
