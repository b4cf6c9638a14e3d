#!/usr/bin/env bash
# Count the statements that only run with a GPU: executed by the tests on CPUs, and on fake cards.
# Usage: coverage.sh [ENVIRONMENT]
set -euo pipefail
cd "$(dirname "$0")/../../.."
environment=$(realpath -m "${1:-.venv-gpu}")
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
python=$environment/bin/python
status=0
RAYPIPE_LANE_SKIPPED=77 tests/gpu/rig/lane.sh "$environment" --collect-only --quiet || status=$?
if [ "$status" = 77 ]; then
  echo "nothing is counted without them"
  exit 0
fi
[ "$status" = 0 ] || exit "$status"
"$python" -m pip install --quiet 'coverage>=7.6'
export PYTHONPATH=$PWD/tests/gpu/measured
RAYPIPE_COVERAGE=$data/cpu CUDA_VISIBLE_DEVICES= "$python" -m pytest --quiet tests/raypipe || true
export RAYPIPE_COVERAGE=$data/rig RAYPIPE_GPU_RIG=$python
"$python" -m pytest --quiet -m "gpu_rig or not gpu_rig" tests/gpu || true
unset PYTHONPATH RAYPIPE_COVERAGE
"$python" -m tests.gpu.gpu_lines "CPU=$data/cpu" "fake cards=$data/rig"
