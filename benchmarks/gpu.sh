#!/usr/bin/env bash
# Builds for the GPU that is here, with the packages that are here, and runs checks and tests on it.
#
#   benchmarks/gpu.sh OUT [kernels] [tests] [train] [layer] [gemm] [accumulation] [precision] [attention] [sharded] [sanitize]
#
# Logs go to the folder OUT; the parts default to the first three.
set -u -o pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu.sh OUT [kernels] [tests] [train] [layer] ...}
shift
mkdir -p "$out"
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
python3 -m pip install -q --no-build-isolation --no-deps -e . -C cmake.define.TE_CUDA=ON \
  -C cmake.define.TE_CUDA_ARCHS="${TE_CUDA_ARCHS:-90a-real}" >"$out/build.log" 2>&1 || { tail -30 "$out/build.log"; exit 1; }
python3 -m transformer_engine_jax
status=0
for part in "${@:-kernels tests train}"; do
  for step in $part; do
    case $step in
      # By name as they end, so that a run that is cut short still says what failed.
      tests) python3 -m pytest -v -n "$(nproc)" --dist worksteal 2>&1 | tee "$out/tests.log" | grep -E "FAILED|ERROR|passed" ;;
      train) python3 examples/train_gpt.py --out "$out/run" 2>&1 | tee "$out/train.log" | tail -20 ;;
      # Every memory-bound kernel at odd sizes and at those of each of its paths; XLA's own kernels (not of namespace te)
      # are left out, or it takes an hour.
      sanitize)
        for tool in memcheck racecheck; do
          compute-sanitizer --tool "$tool" --kernel-name kns=2te --error-exitcode 9 python3 -m benchmarks kernels --no-time --rows 130 \
            --hidden 40 257 1000 1024 4096 2>&1 | tee "$out/$tool.log" | tail -1 || status=1
        done ;;
      kernels | layer | gemm | accumulation | precision | attention | sharded) python3 -m benchmarks "$step" --json "$out/$step.json" 2>&1 | tee "$out/$step.log" ;;
      *) echo "unknown step $step"; exit 2 ;;
    esac || status=1
  done
done
exit $status
