#!/usr/bin/env bash
# A cluster on this machine with a Prometheus that scrapes it, until Ctrl-C. Needs Debian's package prometheus.
# PROMETHEUS: where it listens. RUNBOOKS: where alerts link to the pages of docs/runbooks.
set -euo pipefail
cd "$(dirname "$0")/.."
LISTEN="${PROMETHEUS:-127.0.0.1:9090}"
command -v prometheus >/dev/null || { echo "prometheus is not installed; apt install prometheus"; exit 1; }
FOLDER=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$FOLDER"' EXIT
cp deploy/prometheus/prometheus.yml "$FOLDER/"
sed "s|docs/runbooks/|${RUNBOOKS:-docs/runbooks}/|" deploy/prometheus/rules.yml >"$FOLDER/rules.yml"
.venv/bin/pdcluster up --targets "$FOLDER/targets.json" "$@" &
CLUSTER=$!
prometheus --config.file "$FOLDER/prometheus.yml" --storage.tsdb.path "$FOLDER/data" --web.listen-address "$LISTEN" \
    --log.level error &
echo "prometheus: http://$LISTEN/graph, alerts: http://$LISTEN/alerts; dashboards for Grafana: deploy/grafana/*.json"
wait "$CLUSTER"
