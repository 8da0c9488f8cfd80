#!/usr/bin/env bash
# Runs a command whose bootstraps, nodes and routers have a cluster key: scripts/with_key.sh COMMAND...
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
(umask 077 && openssl rand -hex 32 >"$folder/cluster-key")
for section in BOOTSTRAP NODE ROUTER; do
    export "PDCLUSTER_${section}_SECURITY_CLUSTER_KEY_FILE=$folder/cluster-key"
done
"$@"
