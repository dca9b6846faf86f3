"""Pack a bf16 or fp32 checkpoint into 4 bits, in the layout of compressed-tensors.

Writes shard by shard: started again after an interruption it goes on behind the last whole shard. Embeddings, norms
and the head stay as they are. At the end it prints the error of the packed weights against the source.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from hfpaged.errors import InputError

NAME = "quantize"
SUMMARY = "pack a checkpoint into 4 bits"
FORMATS = ("nvfp4", "mxfp4", "int4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", type=Path, help="directory of a dense checkpoint (safetensors)")
    parser.add_argument("target", metavar="DST", type=Path, help="directory to write")
    parser.add_argument("--format", choices=FORMATS, required=True, help="format of the packed weights")


def run(args: argparse.Namespace) -> int:
    """Returns 0.

    Raises:
        InputError: source and target cannot be used like this.
        CheckpointError: the source cannot be packed.
    """
    from hfpaged.quantization.conversion import Conversion
    from hfpaged.quantization.record import WeightFormat

    if not args.source.is_dir():
        raise InputError(f"{args.source} is no directory")
    if args.target.resolve() == args.source.resolve():
        raise InputError("source and target are the same directory")
    conversion = Conversion(args.source, args.target, WeightFormat(args.format))
    with tqdm(total=conversion.num_tensors, unit="tensor", desc=args.format) as bar:
        conversion.run(lambda name: bar.update())
    error = conversion.error
    worst, layer = error.worst
    print(f"{args.target}: {args.format}, error of the weights {error.relative:.4f} relative to the source")
    print(f"largest in {layer}: {worst:.4f}")
    return 0
