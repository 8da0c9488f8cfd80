#!/usr/bin/env bash
# Builds the images pdcluster/router and pdcluster/node, or those that are named, with buildah, podman or docker, prints their sizes and
# what fills them, and writes their bills of materials (CycloneDX) to build/sbom.
#   scripts/images.sh [router|node|vllm]...     BASE, DEVICE, TORCH_INDEX as in the Dockerfile; TAG; BUILD_FLAGS for the tool;
#                                               RELEASE=1 refuses a base image without a digest
set -euo pipefail
cd "$(dirname "$0")/.."
TOOL=$(command -v buildah || command -v podman || command -v docker) || { echo "none of buildah, podman and docker is installed"; exit 1; }
TAG=${TAG:-$(sed -n 's/^VERSION = "\(.*\)"/\1/p' pdcluster/core/version.py)}
BASE=${BASE:-$(sed -n 's/^ARG BASE=//p' deploy/docker/Dockerfile)}
DEVICE=${DEVICE:-cpu}
PYTHON=${PYTHON:-.venv/bin/python}
if [[ ! "$BASE" =~ @sha256:[0-9a-f]{64}$ ]]; then
    said="BASE=$BASE has no digest: a registry may put another image under this name. Name one as BASE=$BASE@sha256:DIGEST; its digest now: \
skopeo inspect --format '{{.Digest}}' docker://$BASE"
    [ -z "${RELEASE:-}" ] || { echo "images: error: $said" >&2; exit 1; }
    echo "images: warning: $said" >&2
fi
arguments=(--build-arg "BASE=$BASE" --build-arg "DEVICE=$DEVICE")
[ -z "${TORCH_INDEX:-}" ] || arguments+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
run() {
    case "$TOOL" in
        *buildah) id=$(buildah from "$1"); buildah run "$id" -- sh -c "$2"; buildah rm "$id" >/dev/null ;;
        *) "$TOOL" run --rm --entrypoint sh "$1" -c "$2" ;;
    esac
}
targets=("$@")
[ $# -gt 0 ] || targets=(router node)
debian=$(mktemp)
trap 'rm -f "$debian"' EXIT
for target in "${targets[@]}"; do
    image=pdcluster/$target:$TAG
    "$TOOL" build ${BUILD_FLAGS:-} "${arguments[@]}" --target "$target" -t "$image" -f deploy/docker/Dockerfile .
    echo "$image, MB and what fills them:"
    run "$image" 'du -smx / 2>/dev/null | cut -f1; du -sm /opt/pdcluster/lib/python3*/site-packages/* /opt/pdcluster/kernels 2>/dev/null | sort -rn | head -8'
    # shellcheck disable=SC2016
    run "$image" 'dpkg-query -W -f "\${Package} \${Version} \${Architecture}\n"' >"$debian"
    "$PYTHON" -m scripts.sbom "$target" --device "$DEVICE" --base "$BASE" --debian "$debian" -o "build/sbom/pdcluster-$target-$DEVICE-$TAG.cdx.json"
done
