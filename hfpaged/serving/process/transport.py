"""The sockets between client and engine process: one for each direction, private to the two.

`ipc` sockets live in a new directory that only its owner can enter, and that is removed as soon as both ends are
connected. `tcp` sockets are on the loopback interface, where other users can connect; they are encrypted and
authenticated (CURVE) with keys made for this one process.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Literal

import zmq
from msgspec import Struct

from hfpaged.errors import ConfigError
from hfpaged.serving.process.messages import LARGEST_MESSAGE

Transport = Literal["ipc", "tcp"]
TRANSPORTS: tuple[Transport, ...] = ("ipc", "tcp")
# Reports wait, merged, with the tokens they are about; more than a few in the socket would only age there.
MOST_REPORTS = 16
MOST_REQUESTS = 4096
# Room in a Unix socket's address for the file names below.
LONGEST_DIRECTORY = 80


class CurveKeys(Struct, frozen=True):
    """Public key of the server, and a key pair for the one client that may connect. Z85 text."""

    server: str
    client: str
    client_secret: str


class Addresses(Struct, frozen=True):
    """Where the engine's process connects to.

    Attributes:
        requests: the client sends here.
        reports: the client receives here.
        directory: of the socket files, to be removed once connected; None for TCP.
        keys: for TCP.
    """

    requests: str
    reports: str
    directory: str | None = None
    keys: CurveKeys | None = None


class ClientSockets:
    """The client's bound ends.

    Attributes:
        requests: a PUSH socket. reports: a PULL socket. Each is for one thread at a time.
        addresses: for the process that is to connect.
    """

    def __init__(self, transport: Transport) -> None:
        if transport not in TRANSPORTS:
            raise ConfigError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        self._context = zmq.Context()
        self.requests = _socket(self._context, zmq.PUSH, MOST_REQUESTS)
        self.reports = _socket(self._context, zmq.PULL, MOST_REPORTS)
        self.addresses = self._bind_files() if transport == "ipc" else self._bind_loopback()

    def forget_files(self) -> None:
        """Remove the socket files: nobody else is to connect. Does nothing the second time."""
        if self.addresses.directory is not None:
            shutil.rmtree(self.addresses.directory, ignore_errors=True)

    def close(self) -> None:
        """Close both sockets without waiting for what has not been sent."""
        self.requests.close(0)
        self.reports.close(0)
        self._context.destroy(0)
        self.forget_files()

    def _bind_files(self) -> Addresses:
        # mkdtemp makes it 0700.
        directory = Path(tempfile.mkdtemp(prefix="hfpaged-"))
        if len(str(directory)) > LONGEST_DIRECTORY:
            directory.rmdir()
            raise ConfigError(f"the temporary directory {directory.parent} is too long a name for a Unix socket")
        requests, reports = (f"ipc://{directory / name}" for name in ("requests", "reports"))
        self.requests.bind(requests)
        self.reports.bind(reports)
        return Addresses(requests, reports, directory=str(directory))

    def _bind_loopback(self) -> Addresses:
        server, server_secret = zmq.curve_keypair()
        client, client_secret = zmq.curve_keypair()
        for socket in (self.requests, self.reports):
            socket.curve_server = True
            socket.curve_secretkey, socket.curve_publickey = server_secret, server
            socket.bind("tcp://127.0.0.1:*")
        endpoints = (socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self.requests, self.reports))
        keys = CurveKeys(*(key.decode() for key in (server, client, client_secret)))
        return Addresses(*endpoints, keys=keys)


class EngineSockets:
    """The engine process's connected ends: `requests` is a PULL socket, `reports` a PUSH socket."""

    def __init__(self, addresses: Addresses) -> None:
        self._context = zmq.Context()
        self.requests = _socket(self._context, zmq.PULL, MOST_REQUESTS)
        self.reports = _socket(self._context, zmq.PUSH, MOST_REPORTS)
        for socket, address in ((self.requests, addresses.requests), (self.reports, addresses.reports)):
            if addresses.keys is not None:
                socket.curve_serverkey = addresses.keys.server.encode()
                socket.curve_publickey = addresses.keys.client.encode()
                socket.curve_secretkey = addresses.keys.client_secret.encode()
            socket.connect(address)

    def close(self, linger_seconds: float) -> None:
        """Close both sockets; what has not been sent has that long to go."""
        self.requests.close(0)
        self.reports.close(int(linger_seconds * 1000))
        self._context.term()


def _socket(context: zmq.Context, kind: int, high_water_mark: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    socket.set_hwm(high_water_mark)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
