#!/usr/bin/env bash
# Run the tests on fake cards in an environment with torch's CUDA wheel, which is made if missing.
# Usage: lane.sh [ENVIRONMENT [PYTEST ARGUMENTS]]
# Where they cannot run, it says why, and the exit status is 0.
set -euo pipefail
cd "$(dirname "$0")/../../.."
environment=$(realpath -m "${1:-.venv-gpu}")
python=$environment/bin/python
version=2.13.0

skip() {
  echo "tests on fake cards skipped: $1"
  exit 0
}

for tool in gcc nm; do
  command -v "$tool" >/dev/null || skip "$tool is not installed"
done
if ! "$python" -c 'import torch; assert torch.version.cuda' 2>/dev/null; then
  python3 -m venv "$environment"
  # === does not match the CPU wheel, whose version is $version+cpu
  "$python" -m pip install --quiet "torch===$version" ||
    skip "torch $version cannot be installed"
  "$python" -c 'import torch; assert torch.version.cuda' 2>/dev/null ||
    skip "the wheel of torch $version for this platform is not a CUDA wheel"
fi
installed='from importlib.metadata import version; version("raypipe")'
"$python" -c "$installed" 2>/dev/null || "$python" -m pip install --quiet -e '.[test]'
RAYPIPE_GPU_RIG=$python "$python" -m pytest -n 0 -m gpu_rig -rs tests/gpu "${@:2}"
