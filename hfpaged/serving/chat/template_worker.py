"""Renders chat templates in a process of its own, which dies of a template that takes too long or too much memory.

Started by file name, not as a module of hfpaged, and without torch: it needs the template code of Transformers only,
in a fraction of the memory and start-up time. It reads and writes JSON behind a length of four bytes.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

# Transformers takes a module that is None for one that is not installed.
sys.modules["torch"] = None  # type: ignore[assignment]

from transformers.utils import logging  # noqa: E402
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

LENGTH = struct.Struct(">I")


def main(seconds: float, memory_bytes: int) -> None:
    """Answer requests until standard input ends."""
    logging.set_verbosity_error()
    limit = _address_space() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (request := read_message(source)) is not None:
        # Nothing handles the signal, so it ends the process, in whatever C function that is.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = render(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(sink, answer)


def render(request: dict[str, Any]) -> dict[str, Any]:
    """{"text": ...} or {"error": ...}."""
    try:
        rendered = render_jinja_template(
            conversations=[request["messages"]],
            tools=request["tools"],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["variables"],
        )
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # the template's; it may raise whatever it likes
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    texts = rendered[0] if isinstance(rendered, tuple) else rendered
    return {"text": texts[0]}


def read_message(source: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    header = source.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return json.loads(source.read(LENGTH.unpack(header)[0]))


def write_message(sink: BinaryIO, message: dict[str, Any]) -> None:
    """Send a message."""
    body = json.dumps(message).encode()
    sink.write(LENGTH.pack(len(body)) + body)
    sink.flush()


def _address_space() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
