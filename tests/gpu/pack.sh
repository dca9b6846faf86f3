#!/usr/bin/env bash
# Packs what run.sh needs on a machine without a network: this repository, and what that machine lacks.
#
#   pack.sh OUT.tar.xz [--flashinfer TREE] [--wheels DIR] [--newer DIR]
#
#   --flashinfer TREE   a folder with the package flashinfer, its kernels compiled ahead, and what it imports
#   --wheels DIR        unpacked packages that the machine lacks (pytest, psutil, peft, ...)
#   --newer DIR         an unpacked newer Transformers with its own dependencies, to check with both
#
# The archive must stay below 60 MiB.
set -euo pipefail
usage() { sed -n '2,10p' "$0" | sed 's/^# \{0,1\}//'; }
case "${1:-}" in
    -h | --help | "") usage; exit 0 ;;
esac
out=$(realpath -m "$1")
shift
repository=$(realpath "$(dirname "$0")/../..")
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
git -C "$repository" archive --prefix=hfpaged/ HEAD | tar x -C "$stage"
cp "$repository/tests/gpu/run.sh" "$stage/run.sh"
while [ $# -gt 0 ]; do
    case "$1" in
        --flashinfer | --wheels | --newer) cp -r "$(realpath "$2")" "$stage/${1#--}"; shift 2 ;;
        *) echo "unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
done
find "$stage" -name __pycache__ -prune -exec rm -rf {} +
tar c -C "$stage" . | xz -T0 -6 >"$out"
size=$(stat -c %s "$out")
echo "$out: $((size / 1024 / 1024)) MiB"
[ "$size" -lt $((60 << 20)) ] || { echo "too large: the limit is 60 MiB" >&2; exit 1; }
