#!/bin/sh
# Everything that can be shown of AFORE on one GPU, in under eight minutes: tools/gpu_check.sh [--out DIR] [--dry-run]
# Runs from a checkout, without being installed; PYTHON names the interpreter.
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 exec "${PYTHON:-python3}" -m afore.tools.gpu_check "$@"
