#!/usr/bin/env bash
# NOT RUN: no GPU with vLLM was at hand where this was written. One prefill and one decode node with vLLM on one GPU, beside one plain
# vLLM: 20 greedy prompts, then a killed prefill node. About ten minutes. Exits non-zero on a wrong answer, and prints figures.
#   tests/gpu/vllm.sh      PYTHON, VENV (.venv-gpu), FOLDER (a new one) for the checkpoint and logs, GPU_SHARE (0.4) of memory for each engine
# Needs one GPU of 16 GB or more, its driver, Python 3.11 to 3.13, and PyPI. The checkpoint is random and made here.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-gpu}
FOLDER=${FOLDER:-$(mktemp -d)}
GPU_SHARE=${GPU_SHARE:-0.4}

command -v nvidia-smi >/dev/null || { echo "there is no nvidia-smi here; this needs a GPU" >&2; exit 2; }
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
if [ ! -f "$VENV/installed" ] || ! cmp -s pyproject.toml "$VENV/installed"; then
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check '.[vllm]' httpx psutil
    cp pyproject.toml "$VENV/installed"
fi
export PYTHONPATH=$PWD:$PWD/router:$PWD/tests/harness/models HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
timeout --kill-after=20 900 "$VENV/bin/python" tests/gpu/vllm_hand_over.py --folder "$FOLDER" --share "$GPU_SHARE" || {
    code=$?
    echo "failed with $code; logs are in $FOLDER" >&2
    exit "$code"
}
