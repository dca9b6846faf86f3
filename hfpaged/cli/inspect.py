"""Say what a checkpoint is: for each kind of layer its format, groups, scales and bytes, and what runs it here.

Reads headers only, so it takes no time whatever the size. Loading checks the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hfpaged.errors import InputError

NAME = "inspect"
SUMMARY = "say how a checkpoint is quantized and what will run it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="directory of a checkpoint")
    parser.add_argument("--all", action="store_true", help="one line for each module, not for each kind")


def run(args: argparse.Namespace) -> int:
    """Returns 0.

    Raises:
        InputError: there is no such directory, or no checkpoint in it.
        CheckpointError: the checkpoint contradicts itself.
    """
    import torch

    from hfpaged.quantization.checkpoint import CONFIG_FILE
    from hfpaged.quantization.inspection import Inspection
    from hfpaged.runtime.attention.flashinfer_probe import compute_capability, machine_problem

    if not args.path.is_dir():
        raise InputError(f"{args.path} is no directory; what is on the hub has to be downloaded first")
    if not (args.path / CONFIG_FILE).is_file():
        raise InputError(f"{args.path} has no {CONFIG_FILE}, so it is no checkpoint")
    capability = compute_capability(torch.device("cuda")) if torch.cuda.is_available() else None
    for line in Inspection(args.path, capability).lines(every_module=args.all):
        print(line)
    problem = None if capability is None else machine_problem(torch.device("cuda"))
    if problem is not None:
        print(f"not on the GPU: {problem}")
    return 0
