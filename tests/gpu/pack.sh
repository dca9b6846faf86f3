#!/usr/bin/env bash
# Packs what run.sh needs on a machine without a network: this repository, and what that machine lacks.
#
#   pack.sh OUT.tar.xz [--flashinfer DIR] [--kernels DIR] [--wheels DIR] [--newer DIR]
#
#   --flashinfer DIR   a folder with the package flashinfer, of which what compiles attention, norms, activations,
#                      rotations and sampling is packed
#   --kernels DIR      kernels compiled ahead: FlashInfer's cached_ops folder, for the same version of it
#   --wheels DIR       unpacked packages for that machine's Python that it lacks (tvm_ffi, pynvml, ...)
#   --newer DIR        an unpacked newer Transformers with its own dependencies, to check with both
#
# The archive must stay below 60 MiB.
set -euo pipefail
usage() { sed -n '2,12p' "$0" | sed 's/^# \{0,1\}//'; }
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

# FlashInfer is 400 MB, most of it sources of kernels that are never compiled here.
pack_flashinfer() {
    local from=$1 data=flashinfer/data to=$stage/flashinfer
    mkdir -p "$to"
    (
        cd "$from"
        find flashinfer -path $data -prune -o -type f \( -name '*.py' -o -name '*.json' -o -name '*.typed' \) -print
        find $data -maxdepth 1 -type f
        find $data/include $data/spdlog $data/cutlass/include $data/cutlass/tools/util/include -type f
        find $data/cccl/cub $data/cccl/thrust $data/cccl/libcudacxx/include -type f
        find $data/csrc -maxdepth 1 -type f -size -200k
        find $data/csrc/nv_internal -type f
        find . -maxdepth 2 -path './flashinfer_python-*' -type f
    ) 2>/dev/null | tar c -C "$from" --no-recursion -T - | tar x -C "$to"
    [ -f "$to/flashinfer/__init__.py" ] || { echo "no package flashinfer in $from" >&2; exit 1; }
}

pack_kernels() {
    local library
    for library in "$1"/*/*.so; do
        [ -f "$library" ] || { echo "no kernels in $1" >&2; exit 1; }
        mkdir -p "$stage/flashinfer/flashinfer/data/aot/$(basename "$library" .so)"
        strip --strip-unneeded -o "$stage/flashinfer/flashinfer/data/aot/$(basename "$library" .so)/$(basename "$library")" "$library"
    done
}

while [ $# -gt 0 ]; do
    case "$1" in
        --flashinfer) pack_flashinfer "$(realpath "$2")" ;;
        --kernels) pack_kernels "$(realpath "$2")" ;;
        --wheels | --newer) cp -r "$(realpath "$2")" "$stage/${1#--}" ;;
        *) echo "unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
    shift 2
done
find "$stage" -name __pycache__ -prune -exec rm -rf {} +
tar c -C "$stage" . | xz -T0 -6 >"$out"
size=$(stat -c %s "$out")
echo "$out: $((size / 1024 / 1024)) MiB"
[ "$size" -lt $((60 << 20)) ] || { echo "too large: the limit is 60 MiB" >&2; exit 1; }
