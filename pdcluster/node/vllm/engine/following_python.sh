#!/bin/sh
# The interpreter of processes that vLLM starts. The kernel kills them when the node ends, from their first moment on.
exec "$_PDCLUSTER_ENGINE_PYTHON" -IS -c '
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; it outlives execv
if os.getppid() != int(os.environ["_PDCLUSTER_ENGINE_PARENT"]):
    sys.exit(127)  # the node died before
python = os.environ["_PDCLUSTER_ENGINE_PYTHON"]
os.execv(python, [python, *sys.argv[1:]])
' "$@"
