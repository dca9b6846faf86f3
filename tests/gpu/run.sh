#!/usr/bin/env bash
# Checks and measures hfpaged on a machine with a CUDA device, out of what pack.sh packed. Needs no network.
#
#   run.sh [--quick | --dry-run]
#
#   --quick     the checks alone: no compute-sanitizer, and no measuring
#   --dry-run   every section once, on the CPU, over the stand-in for FlashInfer and the device
#
# Uses the python3 that is first on PATH, with its torch, transformers, accelerate and safetensors. Installs nothing:
# everything packed is put on PYTHONPATH. Takes 8 minutes at most: a section that runs out of time is ended, and the next
# one begins. Writes report/ as it goes: what the tests say, the figures as JSON and as a table.
set -uo pipefail
cd "$(dirname "$0")"
mode=${1:-}
case "$mode" in
    -h | --help) sed -n '2,11p' "$(basename "$0")" | sed 's/^# \{0,1\}//'; exit 0 ;;
    "" | --quick | --dry-run) ;;
    *) echo "unknown option $mode" >&2; exit 2 ;;
esac
here=$PWD
# Of the whole, in seconds. A dry run checks what the sections do, not how long they take.
total=470
[ "$mode" = --dry-run ] && total=3600
mkdir -p report work
export FLASHINFER_WORKSPACE_BASE=$here/work HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4 MAX_JOBS=4 PYTHONUNBUFFERED=1
export PYTHONPATH=$here/hfpaged:$here/hfpaged/tests:$here/flashinfer:$here/wheels
# Kernels that were packed are loaded; others are compiled where there is a compiler.
command -v nvcc >/dev/null || export FLASHINFER_DISABLE_JIT=1
# Some of FlashInfer's sources include headers of these packages, which nvcc does not know of.
CPATH=$(python3 -c 'import glob, site; print(":".join(glob.glob(site.getsitepackages()[0] + "/nvidia/*/include")))')
export CPATH
# It links with libcuda.so, of which a machine may have libcuda.so.1 only. An empty one of that name does for the linker.
echo | cc -shared -Wl,-soname,libcuda.so.1 -x c - -o work/libcuda.so 2>/dev/null && export FLASHINFER_EXTRA_LDFLAGS=-L$here/work
failed=0

# section NAME SECONDS COMMAND...: run it, for so long at most, into report/NAME.txt.
section() {
    local name=$1 limit=$2 start=$SECONDS status left=$((total - SECONDS))
    shift 2
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 10 ]; then
        echo "$name: no time left"
        failed=1
        return
    fi
    timeout -k 5 "$limit" "$@" >"$here/report/$name.txt" 2>&1
    status=$?
    [ $status -eq 0 ] || failed=1
    echo "$name: exit $status, $((SECONDS - start)) s: $(tail -n 1 "$here/report/$name.txt")"
}

# Kernels compile, and tiny models run, side by side where that is possible.
tests=(python3 -m pytest -v -p no:cacheprovider -o addopts=--import-mode=importlib --durations=15 --ignore=tests/gpu/test_scripts.py)
parallel=()
python3 -c 'import xdist' 2>/dev/null && [ "$mode" != --dry-run ] && parallel=(-n 12)

cd hfpaged || exit 2
section environment 40 python3 -m hfpaged.cli.main env
case "$mode" in
    --dry-run)
        section checks 900 "${tests[@]}" tests/gpu -k "float16 or (families and llama) or (replays and sampling0) or no_step_waits or ahead or guesses or mixtures or products"
        ;;
    *) section checks 210 "${tests[@]}" "${parallel[@]}" tests/gpu ;;
esac
case "$mode" in
    --dry-run) section figures 900 python3 tests/gpu/measure.py --json "$here/report/figures.json" --turns 1 --dry-run ;;
    --quick) ;;
    *) section figures 190 python3 tests/gpu/measure.py --json "$here/report/figures.json" --seconds 160 ;;
esac
if [ -d "$here/newer" ]; then
    PYTHONPATH=$here/newer:$PYTHONPATH section checks-newer-transformers 60 \
        "${tests[@]}" "${parallel[@]}" tests/gpu/test_engine.py -k "(tiny and llama) or replays"
fi
if [ -z "$mode" ] && command -v compute-sanitizer >/dev/null; then
    section sanitizer 90 compute-sanitizer --error-exitcode 9 "${tests[@]}" tests/gpu/test_attention.py -k "group_sizes and 4"
fi
[ "$mode" = --quick ] || cat "$here/report/figures.txt"
exit $failed
