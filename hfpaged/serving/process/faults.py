"""Exceptions across the process boundary: by the name of a class of hfpaged.errors, never as objects."""

from __future__ import annotations

from hfpaged import errors
from hfpaged.serving.process.messages import Fault

LONGEST_MESSAGE = 2000

# Those whose only argument is their message. What the model or a bug raises arrives as an HfpagedError.
_BY_MESSAGE: dict[str, type[errors.HfpagedError]] = {
    kind.__name__: kind
    for kind in (
        errors.ConfigError,
        errors.InputError,
        errors.UnsupportedOptionError,
        errors.RequestCancelled,
        errors.EngineReleasedError,
        errors.EngineBusyError,
        errors.InvariantError,
        errors.NativeKernelError,
        errors.MissingDependencyError,
        errors.ModelDownloadError,
        errors.InvalidScoresError,
    )
}


def fault_of(error: BaseException) -> Fault:
    """What to send in place of an exception."""
    numbers = [error.needed, error.available] if isinstance(error, errors.RequestTooLargeError) else []
    return Fault(type(error).__name__, str(error)[:LONGEST_MESSAGE], numbers)


def error_of(fault: Fault) -> errors.HfpagedError:
    """The exception that a fault stands for."""
    if fault.kind == errors.RequestTooLargeError.__name__ and len(fault.numbers) == 2:
        return errors.RequestTooLargeError(*fault.numbers)
    if fault.kind == errors.UnsupportedModelError.__name__:
        return errors.UnsupportedModelError([fault.message])
    kind = _BY_MESSAGE.get(fault.kind)
    return kind(fault.message) if kind is not None else errors.HfpagedError(f"{fault.kind}: {fault.message}")
