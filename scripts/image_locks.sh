#!/usr/bin/env bash
# Writes deploy/docker/*.lock: what the images install, with hashes. Needs uv (pip install uv). torch and its GPU libraries are left
# to the Dockerfile, which takes the CPU build or the default one; only Mooncake's CUDA runtime is not torch's.
set -euo pipefail
cd "$(dirname "$0")/.."
UV=${UV:-.venv/bin/uv}
lock() {
    local name=$1
    shift
    $UV pip compile pyproject.toml "$@" -c constraints.txt --python-version 3.11 --python-platform linux --generate-hashes --no-annotate \
        --no-header -q -o "deploy/docker/$name.all"
    awk '/^[a-z]/ { keep = /^nvidia-cuda-runtime-cu12==/ || $0 !~ /^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==/ } keep' "deploy/docker/$name.all" >"deploy/docker/$name.lock"
    rm "deploy/docker/$name.all"
    printf '%s: %s packages\n' "deploy/docker/$name.lock" "$(grep -c == "deploy/docker/$name.lock")"
}
lock router --extra router --extra grammar --extra otel
lock node-cpu --extra node --extra grammar --extra otel --extra mooncake-cpu --extra nixl
lock node-cuda --extra node --extra grammar --extra otel --extra mooncake --extra nixl
