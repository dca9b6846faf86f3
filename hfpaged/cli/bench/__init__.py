"""`hfpaged bench`: engines over one workload, in turn."""
