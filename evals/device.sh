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
device=cuda
if ! python3 -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
    echo "SKIPPED kernel tests on GPU: torch sees none (the CPU ones ran)"
    device=cpu
fi

missing=""
for package in numpy rich tqdm transformers typer yaml; do
    has "$package" || missing="$missing $package"
done
if [ -n "$missing" ]; then
    echo "SKIPPED benchmarks: python3 has no$missing"
    exit 0
fi
# The project is not installed here: the command's package gets its name through a link.
names="$(mktemp -d)"
trap 'rm -rf "$names"' EXIT
ln -s "$PWD/evals" "$names/tokred_evals"
export PYTHONPATH="$names:$PYTHONPATH"
out="${OUT:-evals/results}"
tokred() { python3 -m tokred_evals.cli "$@"; }
if [ "$device" = cpu ]; then
    echo "SKIPPED benchmarks on GPU: they run once on CPU, on tiny models, to see that they work"
    tokred bench kernels --tokens 64 --rounds 2 --json "$names/kernels.json"
    tokred bench prefill --smoke --json "$names/prefill.json"
    exit 0
fi
tokred bench kernels --device cuda --dtype bfloat16 --json "$out/kernels_gpu.json"
for model in llava qwen2_5_vl; do
    tokred bench prefill --models "$model" --device cuda --dtype bfloat16 --json "$out/bench_${model}_gpu.json"
done
