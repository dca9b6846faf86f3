"""Everything that it takes to serve, in one import: fails as a whole where the extra `serve` is not installed."""

from hfpaged.serving.api.address import require_address
from hfpaged.serving.api.app import create_app
from hfpaged.serving.api.limits import ServerLimits
from hfpaged.serving.api.server import log_to_stderr, serve
from hfpaged.serving.api.setup import make_state
from hfpaged.serving.process.client import EngineClient

__all__ = ["EngineClient", "ServerLimits", "create_app", "log_to_stderr", "make_state", "require_address", "serve"]
