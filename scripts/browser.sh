#!/usr/bin/env bash
# What the tests of the console need besides: playwright in .venv, and Debian's chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -c 'import playwright' 2>/dev/null \
    || .venv/bin/python -m pip install --disable-pip-version-check --no-input -q -c constraints.txt -e '.[browser]' --no-build-isolation
command -v chromium >/dev/null && exit
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "chromium is not installed; sudo apt-get install chromium"; exit 1; }
apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null
