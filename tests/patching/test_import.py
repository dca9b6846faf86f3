"""What importing hfpaged does to a process that has not imported Transformers, and to one that has."""

from __future__ import annotations

import subprocess
import sys

import pytest
from engine.hooks import with_import_paths
from transformers import PreTrainedModel

import hfpaged
from hfpaged import patched_model, patching

HFPAGED_FIRST = """
import sys
import hfpaged

assert not {"torch", "transformers"} & set(sys.modules)
assert {"patch", "support", "EngineConfig"} <= set(dir(hfpaged))
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

assert {"modelopt"} <= set(AUTO_QUANTIZATION_CONFIG_MAPPING) & set(AUTO_QUANTIZER_MAPPING)
assert callable(PreTrainedModel.patch) and callable(PreTrainedModel.unpatch)
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "hfpaged.import_hooks"]
assert "hfpaged.patching" not in sys.modules

from hfpaged import *

assert EngineConfig().block_size == 16 and patch is hfpaged.patch and support(3) and hfpaged.errors.ConfigError
"""


def test_it_imports_nothing_and_models_have_the_methods_when_they_come():
    done = subprocess.run(
        [sys.executable, "-c", HFPAGED_FIRST], env=with_import_paths(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_models_that_were_there_have_the_methods(model):
    assert hfpaged.patch is patching.patch and hfpaged.unpatch is patching.unpatch
    assert PreTrainedModel.patch(model, num_blocks=16) is model and hfpaged.engine(model)
    assert PreTrainedModel.unpatch(model) is model and not patched_model.is_patched(model)


def test_names_that_do_not_exist_are_refused_by_name():
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = hfpaged.nothing_of_that_name
