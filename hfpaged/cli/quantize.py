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
        raise InputError(f"{args.source} is no directory; what is on the hub has to be downloaded first")
    if args.target.resolve() == args.source.resolve():
        raise InputError("source and target are the same directory")
    conversion = Conversion(args.source, args.target, WeightFormat(args.format))
    with tqdm(total=conversion.num_tensors, unit="tensor", desc=args.format) as bar:
        conversion.run(lambda name: bar.update())
    error = conversion.error
    worst, layer = error.worst
    before, after = (_mebibytes(folder) for folder in (args.source, args.target))
    print(f"{args.target}: {args.format}, {after:.1f} MiB instead of {before:.1f} MiB")
    print(f"error of the packed weights relative to the source: {error.relative:.4f}, at most {worst:.4f} in {layer}")
    print(f'to load it: hfpaged.from_pretrained("{args.target}")')
    return 0


def _mebibytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
