"""hfpaged: a paged, continuous-batching engine under a live Hugging Face model.

    import hfpaged
    model.patch()                      # or hfpaged.patch(model)
    model.generate(**inputs)           # unchanged code, same tokens

Importing the package gives every `PreTrainedModel` the methods `patch` and `unpatch`.
"""

from transformers import PreTrainedModel

from hfpaged.config import EngineConfig
from hfpaged.generation.call import CancelScope
from hfpaged.loading import from_pretrained
from hfpaged.patch import engine, patch, patched, unpatch, weights_changed
from hfpaged.quantization import registration
from hfpaged.support import support

__version__ = "0.1.0"
__all__ = [
    "CancelScope",
    "EngineConfig",
    "engine",
    "from_pretrained",
    "patch",
    "patched",
    "support",
    "unpatch",
    "weights_changed",
]

PreTrainedModel.patch = patch
PreTrainedModel.unpatch = unpatch
registration.register()
