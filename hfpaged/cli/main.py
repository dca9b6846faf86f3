"""Entry point of the `hfpaged` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

import hfpaged
from hfpaged.cli import demo, env, generate, inspect, quantize, serve, support, verify
from hfpaged.cli.bench import command as bench
from hfpaged.errors import HfpagedError

COMMANDS = (generate, serve, verify, bench, demo, support, inspect, quantize, env)

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        0 on success; 1 where a subcommand's answer is "no"; 2 for an error of the caller's, said in one line on
        stderr; 130 after Ctrl-C.
    """
    _print_unencodable_as_question_marks(sys.stdout)
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except HfpagedError as error:
        print(f"hfpaged: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; each subcommand stores its function as `run`."""
    parser = argparse.ArgumentParser(
        prog="hfpaged", description="Faster generate() for Hugging Face Transformers: paged, batched, prefix-sharing."
    )
    parser.add_argument("--version", action="version", version=f"hfpaged {hfpaged.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _print_unencodable_as_question_marks(stream: TextIO) -> None:
    # A model may emit any character; a terminal that cannot show it must not end the run.
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
