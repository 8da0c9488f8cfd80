#!/usr/bin/env bash
# Builds the images pdcluster/router and pdcluster/node, or those that are named, with buildah, podman or docker, and prints their sizes and what fills them.
#   scripts/images.sh [router|node|vllm]...     BASE, DEVICE, TORCH_INDEX as in the Dockerfile; TAG; BUILD_FLAGS for the tool
set -euo pipefail
cd "$(dirname "$0")/.."
TOOL=$(command -v buildah || command -v podman || command -v docker) || { echo "none of buildah, podman and docker is installed"; exit 1; }
TAG=${TAG:-$(sed -n 's/^VERSION = "\(.*\)"/\1/p' pdcluster/core/version.py)}
arguments=()
for name in BASE DEVICE TORCH TORCH_INDEX; do
    [ -z "${!name:-}" ] || arguments+=(--build-arg "$name=${!name}")
done
run() {
    case "$TOOL" in
        *buildah) id=$(buildah from "$1"); buildah run "$id" -- sh -c "$2"; buildah rm "$id" >/dev/null ;;
        *) "$TOOL" run --rm --entrypoint sh "$1" -c "$2" ;;
    esac
}
targets=("$@")
[ $# -gt 0 ] || targets=(router node)
for target in "${targets[@]}"; do
    "$TOOL" build ${BUILD_FLAGS:-} "${arguments[@]}" --target "$target" -t "pdcluster/$target:$TAG" -f deploy/docker/Dockerfile .
    echo "pdcluster/$target:$TAG, MB and what fills them:"
    run "pdcluster/$target:$TAG" 'du -smx / 2>/dev/null | cut -f1; du -sm /opt/pdcluster/lib/python3*/site-packages/* /opt/pdcluster/kernels 2>/dev/null | sort -rn | head -8'
done
