"""Serve a web page on a patched model: chat for many users at once, a comparison with stock generate(), and a live
picture of the engine. Needs the extra hfpaged[demo].

Everyone who opens the page shares one model and one batch. The page is served on this machine only, unless --host says
otherwise; it has no log-in.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfpaged.cli.arguments import add_model_options, port, positive_int
from hfpaged.errors import HfpagedError, MissingDependencyError
from hfpaged.models.loading import load, set_threads

NAME = "demo"
SUMMARY = "serve a web page: chat, comparison with stock, live engine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, default_dtype="float32")
    parser.add_argument("--host", default="127.0.0.1", metavar="A", help="address to serve on (default: %(default)s)")
    parser.add_argument(
        "--port", type=port, metavar="P", help="port to serve on (default: the first free one from 7860 on)"
    )
    parser.add_argument(
        "--users", type=positive_int, default=32, metavar="N", help="most requests in one batch (default: %(default)s)"
    )
    parser.add_argument(
        "--blocks", type=positive_int, default=1024, metavar="N", help="KV blocks of 16 tokens (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until interrupted."""
    require_gradio()
    serve(args, build(args, *load_model(args)))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of the demo alone, for the script."""
    parser = argparse.ArgumentParser(prog="app.py", description=__doc__)
    add_arguments(parser)
    return parser.parse_args(argv)


def load_model(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """What the command line names: model, tokenizer and label."""
    set_threads(args.threads)
    return load(args.model, args.dtype)


def require_gradio() -> None:
    """Raise `MissingDependencyError` if the demo cannot run."""
    # Before it is imported: it would ask for its newest version and report its use.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("the demo needs gradio; install hfpaged[demo]") from error


def build(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, label: str
) -> Any:  # a gradio.Blocks
    """Patch the model and lay out the page."""
    from hfpaged.demo.host import Host
    from hfpaged.demo.page import build_page

    return build_page(Host(model, tokenizer, label, max_requests=args.users, num_blocks=args.blocks))


def serve(args: argparse.Namespace, page: Any) -> None:
    """Serve the page until interrupted.

    Raises:
        HfpagedError: the port is taken.
    """
    from hfpaged.demo.page import launch

    try:
        launch(page, args.host, args.port or None)
    except OSError as error:
        where = args.port or "any port from 7860 to 7959"
        raise HfpagedError(f"cannot serve on {args.host}, {where}: it is taken, or not to be had") from error
