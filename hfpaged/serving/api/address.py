"""Whether a server can listen where it was told to, asked before minutes go into loading its model."""

from __future__ import annotations

import errno
import os
import socket
import stat

from hfpaged.errors import ConfigError


def require_address(host: str, port: int, uds: str | None) -> None:
    """Bind what uvicorn will, and let go of it.

    Raises:
        ConfigError: the address does not exist here, or is taken.
    """
    try:
        if uds is not None:
            _try_path(uds)
        else:
            _try_host(host, port)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot listen on {uds or f'{host}:{port}'}: {reason}") from error


def _try_host(host: str, port: int) -> None:
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            # A name may stand for an IPv6 address too, where the system has no IPv6: uvicorn leaves that out.
            if error.errno != errno.EAFNOSUPPORT:
                raise
            continue
        with listener:
            # As servers do, so that connections of an earlier one that linger are no obstacle.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)


def _try_path(path: str) -> None:
    # uvicorn takes the place of a socket that an earlier server left.
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
    os.unlink(path)
