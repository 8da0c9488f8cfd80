#!/bin/sh
# Puts the image's compiled kernels where this container may write, then becomes the command.
set -e
seed=/opt/pdcluster/kernels
if [ -d "$seed" ] && mkdir -p "$PDCLUSTER_CACHE_DIR" 2>/dev/null; then
    for place in "$seed"/*; do
        [ -e "$PDCLUSTER_CACHE_DIR/${place##*/}" ] || cp -R "$place" "$PDCLUSTER_CACHE_DIR/" || echo "the kernel cache $PDCLUSTER_CACHE_DIR cannot be written" >&2
    done
fi
exec "$@"
