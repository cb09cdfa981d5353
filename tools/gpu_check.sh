#!/usr/bin/env bash
# What only a GPU can show: the contract tests of the Triton kernels and their speed. Installs nothing, under 5 minutes.
# Usage: tools/gpu_check.sh [PYTHON]; ends with tables, and writes gpu_check.json and gpu_steps.json into $OUT (or .).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
out=${OUT:-.}
export PYTHONPATH=.:kernels:models:quantize:tui
unset TRITON_INTERPRET
"$python" - <<'PY' || exit 1
import sys
import torch
try:
    import triton
except ImportError:
    sys.exit("gpu_check: Triton is not installed beside torch")
if not torch.cuda.is_available():
    sys.exit("gpu_check: torch finds no CUDA device")
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
PY
status=0
if "$python" -c "import pytest" 2>/dev/null; then
    timeout 130 "$python" -m pytest tests/gpu -q -x -p no:cacheprovider --import-mode=importlib || status=1
else
    echo "gpu_check: pytest is not installed, the contract tests were NOT RUN" && status=1
fi
timeout 60 "$python" tools/gpu_bench.py "$out/gpu_check.json" || status=1
timeout 100 "$python" tools/gpu_step_bench.py "$out/gpu_steps.json" || status=1
exit $status
