#!/usr/bin/env bash
# Checks on a machine with a GPU, with the python3 found there; installs nothing and says what it could not run.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

has() { python3 -c "import $1" 2>/dev/null; }

python3 --version
if ! has torch; then
    echo "SKIPPED everything: python3 has no torch"
    exit 1
fi
python3 - <<'PY'
import torch

name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
print(f"torch {torch.__version__}, GPU: {name}")
PY
if ! has pytest; then
    echo "SKIPPED kernel tests: python3 has no pytest"
    exit 1
fi
# The configuration of the project expects plugins and packages that this machine may lack.
python3 -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider --confcutdir tests/kernels tests/kernels
if ! python3 -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    echo "SKIPPED kernel tests on GPU: torch sees none (the CPU ones ran)"
fi
has transformers || echo "SKIPPED model tests: python3 has no transformers"
