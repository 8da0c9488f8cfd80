"""A spare process for tests: waits as a router's does, then becomes the fake child that it is told to be."""

import os
import sys

from pdcluster.processes.spare import awaited_argv

argv = awaited_argv()
if argv is not None:
    os.execv(argv[0], argv)
sys.exit(0)
