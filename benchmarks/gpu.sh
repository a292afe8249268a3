#!/usr/bin/env bash
# Builds for the GPU that is here, with the packages that are here, and runs checks and tests on it.
#
#   benchmarks/gpu.sh OUT [kernels] [tests] [train] [layer] [gemm] [accumulation] [precision] [attention] [stack] [generate]
#                         [sharded] [agreement] [sanitize]
#
# Logs go to the folder OUT; the parts default to the first three.
set -u -o pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu.sh OUT [kernels] [tests] [train] [layer] ...}
shift
mkdir -p "$out"
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
python3 -m pip install -q --no-build-isolation --no-deps -e . --config-settings=cmake.define.TE_CUDA=ON \
  --config-settings=cmake.define.TE_CUDA_ARCHS="${TE_CUDA_ARCHS:-90a-real}" >"$out/build.log" 2>&1 ||
  { tail -30 "$out/build.log"; exit 1; }
python3 -m transformer_engine_jax
status=0
for part in "${@:-kernels tests train}"; do
  for step in $part; do
    case $step in
      # By name as they end, so that a run that is cut short still says what failed.
      tests) python3 -m pytest -v -n "$(nproc)" --dist worksteal 2>&1 | tee "$out/tests.log" | grep -E "FAILED|ERROR|passed" ;;
      train) python3 examples/train_gpt.py --out "$out/run" 2>&1 | tee "$out/train.log" | tail -20 ;;
      # Every kernel in a program of its own (cpp/sanitize.cu), as XLA under the sanitizer takes minutes.
      sanitize)
        cmake -S . -B build/sanitize -DTE_CUDA=ON -DTE_CUDA_ARCHS="${TE_CUDA_ARCHS:-90a-real}" \
          -DPython_EXECUTABLE="$(command -v python3)" -DCMAKE_BUILD_TYPE=Release >"$out/sanitize.log" 2>&1 &&
          cmake --build build/sanitize --target te_sanitize -j "$(nproc)" >>"$out/sanitize.log" 2>&1 || { tail -30 "$out/sanitize.log"; exit 1; }
        export LD_LIBRARY_PATH="$(python3 -c 'import nvidia, os; print(":".join(os.path.join(p, d, "lib") for p in nvidia.__path__ for d in ("cu13", "cublas")))'):${LD_LIBRARY_PATH:-}"
        compute-sanitizer --error-exitcode 9 build/sanitize/te_sanitize >"$out/memcheck.log" 2>&1 || status=1
        # racecheck takes minutes, most of them on the CPU: parts side by side.
        racechecks=()
        for part in casts activations norms turns rotations packed dropouts softmaxes states products; do
          compute-sanitizer --tool racecheck --error-exitcode 9 build/sanitize/te_sanitize few $part >"$out/racecheck-$part.log" 2>&1 &
          racechecks+=($!)
        done
        for check in "${racechecks[@]}"; do wait "$check" || status=1; done
        tail -qn 1 "$out/memcheck.log" "$out"/racecheck-*.log ;;
      # Random modules against the CPU; each process compiles on one core.
      agreement)
        agreements=()
        for i in $(seq "$(nproc)"); do
          TE_GEMM_TUNING=0 python3 -m benchmarks agreement --first-seed "${i}0000" --cases 30 >"$out/agreement-$i.log" 2>&1 &
          agreements+=($!)
        done
        for check in "${agreements[@]}"; do wait "$check" || status=1; done
        if grep -h DIFFERS "$out"/agreement-*.log; then status=1; fi ;;
      kernels | layer | gemm | accumulation | precision | attention | stack | generate | sharded) python3 -m benchmarks "$step" --json "$out/$step.json" 2>&1 | tee "$out/$step.log" ;;
      *) echo "unknown step $step"; exit 2 ;;
    esac || status=1
  done
done
exit $status
