"""The step program: a model's decoder layers compiled into one native call per step, on CPU."""
