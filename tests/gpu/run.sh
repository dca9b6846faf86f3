#!/usr/bin/env bash
# Checks and measures hfpaged on a machine with a CUDA device, out of what pack.sh packed. Needs no network.
#
#   run.sh [--quick]     --quick: the checks without compute-sanitizer, and no measuring
#
# Uses the python3 that is first on PATH, with its torch, transformers, accelerate and safetensors. Installs nothing:
# everything packed is put on PYTHONPATH. Writes report/: the test reports, the figures as JSON and as a table.
set -uo pipefail
cd "$(dirname "$0")"
case "${1:-}" in
    -h | --help) sed -n '2,7p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    "" | --quick) quick=${1:-} ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
esac
here=$PWD
mkdir -p report work
export FLASHINFER_WORKSPACE_BASE=$here/work HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4
[ -d flashinfer ] && export FLASHINFER_DISABLE_JIT=1
paths=$here/hfpaged:$here/flashinfer:$here/wheels
failed=0

step() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout "$limit" "$@" >"report/$name.txt" 2>&1
    status=$?
    [ $status -eq 0 ] || failed=1
    echo "$name: exit $status, $((SECONDS - start)) s: $(tail -n 1 "report/$name.txt")"
}

tests() {
    python3 -m pytest -q -p no:cacheprovider -o addopts="--import-mode=importlib" "$@"
}
export -f tests

export PYTHONPATH=$paths
step environment 60 python3 -m hfpaged.cli.main env
cd hfpaged || exit 2
mkdir -p report && rmdir report && ln -sfn "$here/report" report
step checks 240 bash -c 'tests tests/gpu'
if [ -d "$here/newer" ]; then
    PYTHONPATH=$here/newer:$paths step checks-newer-transformers 120 bash -c 'tests tests/gpu/test_engine.py -k "tiny or replays"'
fi
if [ -z "$quick" ]; then
    if command -v compute-sanitizer >/dev/null; then
        step sanitizer 120 compute-sanitizer --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider \
            -o addopts="--import-mode=importlib" tests/gpu/test_attention.py -k "group_sizes and 4"
    fi
    step figures 240 python3 tests/gpu/measure.py --json report/figures.json
    cat report/figures.txt
fi
exit $failed
