"""A hot reloader drops the package from `sys.modules` and imports it anew; the model stays, and is patched again."""

from __future__ import annotations

import subprocess
import sys

from engine.hooks import with_import_paths

SCRIPT = """
import sys
import hfpaged
from families import build_tiny

model = build_tiny("llama")
prompt, options = [5, 6, 7], {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1}
model.patch(num_blocks=64)
texts = [hfpaged.engine(model).submit(prompt, **options).result()]
for name in [name for name in sys.modules if name.split(".")[0] == "hfpaged"]:
    del sys.modules[name]
import hfpaged as again

assert again is not hfpaged
model.patch(num_blocks=64)
engine = again.engine(model)
assert type(engine).__mro__[1] is sys.modules["hfpaged.runtime.engine"].EngineCore
texts.append(engine.submit(prompt, **options, hfpaged={"scope": again.CancelScope()}).result())
model.patch(num_blocks=64)
assert again.engine(model) is engine
model.unpatch()
assert "hfpaged" not in type(model).__module__ and not again.patch.__globals__["is_patched"](model)
assert texts[0] == texts[1], texts
"""


def test_a_model_patched_before_a_reimport_is_patched_by_the_new_code():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=with_import_paths(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
