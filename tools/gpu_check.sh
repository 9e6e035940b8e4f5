#!/bin/sh
# Everything that can be shown of AFORE on one GPU, in under eight minutes: tools/gpu_check.sh [--out DIR] [--dry-run]
# Runs from a checkout, without being installed; PYTHON names the interpreter.
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "gpu_check: $python is no Python 3.11 or later; name one in PYTHON" >&2
    exit 2
fi
if ! "$python" -c 'import numpy' 2>/dev/null; then
    echo "gpu_check: $python has no numpy; PYTHON names an interpreter with torch, transformers and what docs/gpu.md lists" >&2
    exit 2
fi
root=$(CDPATH='' cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 exec "$python" -m afore.tools.gpu_check "$@"
