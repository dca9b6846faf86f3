"""Serve a model over HTTP with the OpenAI API.

The engine runs in a process of its own. The server listens on 127.0.0.1 unless told otherwise, where everybody on this
machine can use it; give it an API key before it listens elsewhere: in the environment variable HFPAGED_API_KEY, or in
a file named with --api-key-file.

SIGTERM and Ctrl-C let running requests finish (see --drain-seconds); a second one ends at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hfpaged.cli.arguments import DTYPES, count, port, positive_float, positive_int, seconds
from hfpaged.config import EngineConfig
from hfpaged.errors import ConfigError, InputError, MissingDependencyError
from hfpaged.models.loading import load_tokenizer, resolve

logger = logging.getLogger(__name__)

NAME = "serve"
SUMMARY = "serve a model with the OpenAI API"

API_KEY_VARIABLE = "HFPAGED_API_KEY"
SHORTEST_API_KEY = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="directory or hub id (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--name", metavar="NAME", help="the model's name in requests (default: that of the directory)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="default: %(default)s")
    parser.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"instead of ${API_KEY_VARIABLE}")
    parser.add_argument("--cors-origin", action="append", default=[], metavar="URL", help="web pages that may call")
    parser.add_argument("--allowed-host", action="append", default=[], metavar="H", help="Host headers to answer")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="of the weights (default: %(default)s)"
    )
    engine.add_argument("--threads", type=positive_int, metavar="N", help="CPU threads (default: torch's choice)")
    engine.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"an option of the engine: {', '.join(field.name for field in dataclasses.fields(EngineConfig))}",
    )
    engine.add_argument(
        "--transport", choices=("ipc", "tcp"), default="ipc", help="to the engine (default: %(default)s)"
    )
    engine.add_argument(
        "--restarts",
        type=count,
        default=0,
        metavar="N",
        help="replace a dead engine up to N times (default: %(default)s)",
    )
    engine.add_argument(
        "--tool-format", metavar="F", help="hermes, llama3_json, mistral or none (default: by template)"
    )
    _add_limits(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    for flag, kind, default, text in (
        ("--max-body-bytes", positive_int, 4 << 20, "of a request"),
        ("--max-sequences", positive_int, 1024, "texts running or waiting; more get status 503"),
        ("--stall-seconds", positive_float, 60.0, "a reader that takes nothing for so long is disconnected"),
        ("--template-seconds", positive_float, 5.0, "for rendering a conversation"),
        ("--drain-seconds", seconds, 30.0, "for running requests after SIGTERM"),
    ):
        limits.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Returns 0 after the server was told to end."""
    serving = _import_serving()
    api_key = read_api_key(args.api_key_file)
    options = engine_options(args.engine)
    EngineConfig.from_options(options)
    serving.require_address(args.host, args.port, args.uds)
    serving.log_to_stderr()
    source, label = resolve(args.model)
    tokenizer = load_tokenizer(source)
    client = serving.EngineClient(
        str(source),
        dtype=args.dtype,
        threads=args.threads,
        transport=args.transport,
        restarts=args.restarts,
        on_progress=log_progress,
        **options,
    )
    try:
        limits = serving.ServerLimits(
            body_bytes=args.max_body_bytes,
            sequences=args.max_sequences,
            stall_seconds=args.stall_seconds,
            template_seconds=args.template_seconds,
            drain_seconds=args.drain_seconds,
        )
        state = serving.make_state(args.name or label, client, tokenizer, args.tool_format, limits)
        app = serving.create_app(state, api_key=api_key, cors_origins=args.cors_origin, allowed_hosts=args.allowed_host)
        serving.serve(app, state, args.host, args.port, args.uds)
    finally:
        client.close()
    return 0


def _import_serving() -> ModuleType:
    try:
        from hfpaged.serving import server
    except MissingDependencyError:
        raise
    except ImportError as error:
        raise MissingDependencyError(f"hfpaged serve needs {error.name}: pip install 'hfpaged[serve]'") from error
    return server


def engine_options(pairs: Sequence[str]) -> dict[str, Any]:
    """{"NAME": VALUE} from ["NAME=VALUE"], where a value that is JSON is read as such.

    Raises:
        InputError: one is no pair.
    """
    options = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InputError(f"--engine takes NAME=VALUE, got {pair!r}")
        try:
            options[name] = json.loads(text.replace("True", "true").replace("False", "false"))
        except ValueError:
            options[name] = text
    return options


def read_api_key(file: Path | None) -> str | None:
    """The API key from the file or the environment; None if there is none.

    Raises:
        InputError: the file cannot be read.
        ConfigError: the key is too short to be one.
    """
    key = os.environ.get(API_KEY_VARIABLE)
    if file is not None:
        try:
            key = file.read_text().strip()
        except OSError as error:
            raise InputError(f"cannot read the API key: {error}") from error
    if key is not None and len(key) < SHORTEST_API_KEY:
        raise ConfigError(f"the API key has fewer than {SHORTEST_API_KEY} characters")
    return key


def log_progress(stage: str, fraction: float) -> None:
    """How far loading has come, to the log."""
    logger.info("engine: %s %.0f %%", stage, fraction * 100)
