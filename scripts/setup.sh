#!/usr/bin/env bash
# Everything that `make demo` and `make test` need, in .venv: pinned dependencies (constraints.txt), torch as a CPU build where one can be
# had, and libibverbs1 for the mooncake transfer engine; mooncake and nixl are left out where they can not be had. Run again it returns at
# once, until one of the files that it depends on changes.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.setup-stamp
LOG=$VENV/setup.log
TORCH=$(sed -n 's/^torch==//p' constraints.txt)
COMPILING_S=240
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

fingerprint() { cat pyproject.toml constraints.txt scripts/setup.sh | cksum; pwd; }

is_current() { [ -x $VENV/bin/python ] && [ -f $STAMP ] && [ "$(cat $STAMP)" = "$(fingerprint)" ]; }

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 found; install one (apt-get install python3 on Debian 12 and later) or say which: make PYTHON=/path/to/python3"
}

is_root() { [ "$(id -u)" = 0 ]; }

apt_install() {
    is_root && command -v apt-get >/dev/null || return 1
    local apt=(apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=15 -o Acquire::https::Timeout=15 -o DPkg::Lock::Timeout=60)
    export DEBIAN_FRONTEND=noninteractive
    "${apt[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1 && return
    "${apt[@]}" update >/dev/null 2>&1 && "${apt[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1
}

make_venv() {
    local python=$1
    if [ -x $VENV/bin/python ] && is_supported $VENV/bin/python && $VENV/bin/python -m pip --version >/dev/null 2>&1; then
        return
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        say "this Python has no venv module; installing python3-venv with apt"
        apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" \
            || die "$python cannot make virtual environments; install them: sudo apt-get install python3-venv"
    fi
    say "making $VENV with $("$python" --version)"
    rm -rf $VENV
    "$python" -m venv $VENV
}

pip_install() { $VENV/bin/python -m pip install --disable-pip-version-check --no-input -qq -c constraints.txt "$@" 2>>$LOG; }

must_install() {
    pip_install "$@" && return
    grep -v '^WARNING' $LOG | tail -n 8 >&2
    die "pip could not install $* (all of its output: $LOG); check the network or the configured package index, then run make again"
}

has_torch() { [ "$($VENV/bin/python -c 'from importlib.metadata import version; print(version("torch").partition("+")[0])' 2>/dev/null)" = "$TORCH" ]; }

install_torch() {
    if has_torch; then return; fi
    say "installing torch $TORCH, CPU build (about 200 MB)"
    if pip_install --no-deps --retries 1 "torch==$TORCH+cpu"; then return; fi
    if pip_install --no-deps --timeout 10 --retries 1 --index-url $TORCH_CPU_INDEX "torch==$TORCH"; then return; fi
    say "no CPU build at the configured index or at $TORCH_CPU_INDEX; taking the default build, which may bring gigabytes of GPU libraries"
    must_install "torch==$TORCH"
}

has_libibverbs() { $VENV/bin/python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; }

# What the CUDA build of Mooncake loads besides its own files and libibverbs.
has_cuda() { $VENV/bin/python -c 'import ctypes; [ctypes.CDLL(f"lib{x}") for x in ("cuda.so.1", "cudart.so.12", "mlx5.so.1", "curl.so.4")]' 2>/dev/null; }

install_mooncake() {
    [ "$(uname -s)" = Linux ] || { say "skipped: the mooncake transfer engine runs on Linux only; shm and tcp work"; return; }
    if ! has_libibverbs && ! apt_install libibverbs1; then
        say "skipped: libibverbs1 is missing, so the mooncake transfer engine cannot load; shm and tcp work. To get it: sudo apt-get install libibverbs1"
    fi
    local extra=mooncake-cpu other=mooncake-transfer-engine
    if has_cuda; then extra=mooncake other=mooncake-transfer-engine-non-cuda; fi
    $VENV/bin/python -m pip uninstall -qq -y $other 2>>$LOG  # both have the module `mooncake`
    pip_install -e ".[$extra]" --no-build-isolation \
        || say "skipped: the mooncake transfer engine has no package for this machine (see $LOG); shm and tcp work"
}

install_nixl() {
    [ "$(uname -s)" = Linux ] || return 0
    say "installing nixl (about 70 MB)"
    pip_install --no-deps --timeout 15 --retries 1 nixl-cu12 \
        || say "skipped: nixl has no package for this machine (see $LOG); its tests are skipped, the other backends work"
}

start_compiling() {
    # Beside the downloads that are left: one to two minutes that the first `make up` or `make demo` would wait for.
    say "compiling the CPU kernels beside the next downloads"
    $VENV/bin/python -m pdcluster.launch.warm >$VENV/warm.log 2>&1 9<&- &
    COMPILING=$!
    trap 'kill $COMPILING 2>/dev/null || :' EXIT
}

end_compiling() {
    for _ in $(seq $((2 * COMPILING_S))); do
        kill -0 $COMPILING 2>/dev/null || break
        sleep 0.5
    done
    if kill -0 $COMPILING 2>/dev/null; then
        kill $COMPILING
        say "skipped: the CPU kernels did not compile within $COMPILING_S s; the first node compiles them when it starts"
    elif wait $COMPILING; then
        say "$(tail -n 1 $VENV/warm.log)"
    else
        say "skipped: the CPU kernels did not compile (see $VENV/warm.log); the first node tries again when it starts"
    fi
    trap - EXIT
}

main() {
    if command -v flock >/dev/null; then
        exec 9<scripts/setup.sh
        flock 9  # two makes at once: the second waits and finds all done
    fi
    if is_current; then return; fi
    local python
    python=$(find_python)
    make_venv "$python"
    : >$LOG
    install_torch
    say "installing the other packages, pinned by constraints.txt"
    must_install hatchling editables
    must_install -e '.[node,grammar,dev,otel]' --no-build-isolation
    start_compiling
    install_mooncake
    install_nixl
    end_compiling
    fingerprint >$STAMP
    say "done"
}

main
