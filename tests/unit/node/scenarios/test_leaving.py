"""A node ends with its own exit code although a compile of a grammar goes on, which nobody can end."""

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

PROGRAM = """
import sys, time
from pdcluster.engine.sampling.grammar import Grammars, Vocabulary
from pdcluster.core.grammar import Grammar
from pdcluster.processes.leaving import leave_if_stuck
hangs = lambda grammar: time.sleep(600)
grammars = Grammars(lambda: Vocabulary([b"a", b""], 2, [1]), make=lambda vocabulary: hangs)
grammars.want(Grammar("start: /a/"))
until = time.monotonic() + 60
while not grammars.num_computing or None in grammars._began.values():
    assert grammars._began and time.monotonic() < until, grammars._refused
    time.sleep(0.01)
time.sleep(0.5)
grammars.close()
print("closed", grammars.num_computing)
LEAVE
sys.exit(3)
"""


@pytest.mark.parametrize("code", [0, 1])
def test_a_process_with_a_compile_that_never_ends_leaves_with_its_code(code):
    text = textwrap.dedent(PROGRAM).replace("LEAVE", f"leave_if_stuck(grammars.num_computing, {code})")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code and "closed 1" in done.stdout, done.stderr
    assert "terminate called" not in done.stderr and "leaving without them" in done.stderr


BREAKS = """
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from pdcluster.processes.leaving import leave_last
with ExitStack() as stack:
    stack.push(partial(leave_last, SimpleNamespace(num_stuck=grammars.num_computing)))
    stack.callback(print, "closed all", flush=True)
    raise RuntimeError("a step failed")
"""


def test_a_node_that_breaks_beside_such_a_compile_says_why_and_leaves_with_1():
    text = textwrap.dedent(PROGRAM).replace("LEAVE", BREAKS)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "closed all" in done.stdout, done.stderr
    assert "a step failed" in done.stderr and "terminate called" not in done.stderr


def test_a_process_without_one_goes_on():
    from pdcluster.processes.leaving import leave_if_stuck, leave_last

    leave_if_stuck(0, 1)
    goes_on = leave_last(SimpleNamespace(num_stuck=0), RuntimeError, RuntimeError("told by whoever catches it"), None)
    assert goes_on is None, "the error is not swallowed"
