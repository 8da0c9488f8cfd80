#!/bin/sh
# Puts the image's compiled kernels where this container may write, then becomes the command.
set -e
seed=/opt/pdcluster/kernels
if [ -d "$seed" ]; then
    if ! mkdir -p "$PDCLUSTER_CACHE_DIR" || [ ! -w "$PDCLUSTER_CACHE_DIR" ]; then
        echo "the kernel cache $PDCLUSTER_CACHE_DIR cannot be written by uid $(id -u), so the image's kernels are not used; mount a volume there that it may write" >&2
    else
        for place in "$seed"/*; do
            [ -e "$PDCLUSTER_CACHE_DIR/${place##*/}" ] || cp -R "$place" "$PDCLUSTER_CACHE_DIR/" || echo "$place could not be copied to the kernel cache $PDCLUSTER_CACHE_DIR" >&2
        done
    fi
fi
exec "$@"
