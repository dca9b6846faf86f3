"""ChatTemplate: a model's own chat template, rendered where it can do no harm."""

from __future__ import annotations

import asyncio
import json
import os
import select
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from hfpaged.errors import InputError, UnsupportedOptionError

# As in the worker, which cannot be imported: it does without torch.
LENGTH = struct.Struct(">I")
WORKER = Path(__file__).with_name("template_worker.py")
MEMORY_BYTES = 512 << 20
LONGEST_TEXT = 64 << 20
# The worker ends itself after its time; this is for one that could not even do that.
GRACE_SECONDS = 2.0
START_SECONDS = 120.0


class ChatTemplate:
    """Renders in a worker process, one conversation at a time. Any thread may call it.

    Args:
        template: Jinja source, as tokenizers have it.
        variables: what the template sees beside the conversation (the tokenizer's special tokens).
        seconds: most time for one conversation.
    """

    def __init__(self, template: str, variables: dict[str, Any], seconds: float):
        self.source = template
        self._variables = variables
        self._seconds = seconds
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._is_warm = False

    @property
    def mentions_tools(self) -> bool:
        """Whether the template looks at tools at all."""
        return "tools" in self.source

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
    ) -> str:
        """The prompt text of a conversation.

        Args:
            variables: more of what the template sees.

        Raises:
            InputError: the template refused the conversation, or took too long or too much memory over it.
            UnsupportedOptionError: a variable has the name of something else.
        """
        taken = sorted(set(variables) & ({"messages", "tools", "template"} | set(self._variables)))
        if taken:
            raise UnsupportedOptionError(f"chat_template_kwargs cannot set {', '.join(taken)}")
        request = {
            "messages": messages,
            "tools": tools,
            "template": self.source,
            "variables": {**self._variables, **variables},
        }
        answer = await asyncio.to_thread(self._ask, json.dumps(request).encode())
        if "error" in answer:
            raise InputError(f"the model's chat template does not take this conversation: {answer['error']}")
        return answer["text"]

    def start(self) -> None:
        """Start the worker, so that the first conversation need not wait for it."""
        with self._lock:
            self._ensure_worker()

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._end_worker()

    def _ask(self, body: bytes) -> dict[str, Any]:
        with self._lock:
            worker = self._ensure_worker()
            try:
                worker.stdin.write(LENGTH.pack(len(body)) + body)
                worker.stdin.flush()
                patience = self._seconds + GRACE_SECONDS + (0 if self._is_warm else START_SECONDS)
                answer = _read_answer(worker, patience)
            except (OSError, EOFError, TimeoutError):
                self._end_worker()
                return {"error": f"it takes longer than {self._seconds:g} s, or too much memory"}
            self._is_warm = True
            return answer

    def _ensure_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is None or self._worker.poll() is not None:
            self._end_worker()
            command = [sys.executable, str(WORKER), str(self._seconds), str(MEMORY_BYTES)]
            self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._worker

    def _end_worker(self) -> None:
        worker, self._worker, self._is_warm = self._worker, None, False
        if worker is not None:
            worker.kill()
            worker.wait()
            worker.stdin.close()
            worker.stdout.close()


def _read_answer(worker: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    descriptor = worker.stdout.fileno()
    length = LENGTH.unpack(_read_exactly(descriptor, LENGTH.size, seconds))[0]
    if length > LONGEST_TEXT:
        raise EOFError
    return json.loads(_read_exactly(descriptor, length, seconds))


def _read_exactly(descriptor: int, count: int, seconds: float) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if not select.select([descriptor], [], [], seconds)[0]:
            raise TimeoutError
        part = os.read(descriptor, count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
