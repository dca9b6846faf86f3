"""Optional media packages that raise when they are imported block nothing of a text model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
import hfpaged
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)).eval()
model.patch(num_blocks=16)
ids = torch.tensor([[1, 2, 3]])
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
assert out.shape[1] > 3 and hfpaged.engine(model).stats()["steps"] > 0
print("served")
"""


def test_packages_that_raise_at_import_are_not_in_the_way(tmp_path: Path):
    for name in ("torchcodec",):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('{name}: no FFmpeg libraries')\n")
        # Transformers asks for the version of what is installed before it imports it.
        info = tmp_path / f"{name}-0.7.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.7.0\n")
    package = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(package)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "served"
