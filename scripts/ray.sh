#!/usr/bin/env bash
# Ray Serve in .venv, by the pinned versions.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -c "import ray.serve" 2>/dev/null || .venv/bin/python -m pip install --disable-pip-version-check -q "ray[serve]" -c constraints.txt
