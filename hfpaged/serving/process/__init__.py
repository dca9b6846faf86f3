"""The engine's process: its messages, its loop, and the client that starts it and talks to it."""

from hfpaged.errors import MissingDependencyError

try:
    import msgspec as msgspec
    import zmq as zmq
except ImportError as error:
    raise MissingDependencyError(
        f"an engine in a process of its own needs {error.name}: pip install 'hfpaged[serve]'"
    ) from error
