"""A child process for the supervisor's tests: announces itself, writes down what happens to it, and behaves as its
arguments say."""

import argparse
import json
import os
import signal
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("journal")
parser.add_argument("--ready-fd", type=int)
parser.add_argument("--address", default="127.0.0.1:1")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--babble", action="store_true", help="announce something that is not JSON")
parser.add_argument("--exit-first", type=int, help="exit with this code instead of announcing")
parser.add_argument("--crash-times", type=int, default=0, help="crash right after being ready, so often")
parser.add_argument("--leave", action="store_true", help="exit 0 right after being ready")
parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
parser.add_argument("--say", default="")
parser.add_argument("--grandchild", action="store_true", help="fork a process that would live on")
args = parser.parse_args()


def note(what: str) -> None:
    with open(args.journal, "a") as journal:
        journal.write(f"{args.name} {what}\n")


def on_term(number: int, frame: object) -> None:
    note("terminated")
    sys.exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if args.stubborn else on_term)
note(f"started {os.getpid()} {args.address}")
print(args.say or "hello", flush=True)
if args.exit_first is not None:
    sys.exit(args.exit_first)
if args.grandchild and (pid := os.fork()):
    note(f"grandchild {pid}")
elif args.grandchild:
    os.close(args.ready_fd)
    time.sleep(60)
if args.never_ready:
    time.sleep(60)
os.write(
    args.ready_fd,
    b"babble\n"
    if args.babble
    else json.dumps({"ready": True, "address": args.address, "pid": os.getpid()}).encode() + b"\n",
)
os.close(args.ready_fd)
with open(args.journal) as journal:
    starts = sum(line.startswith(f"{args.name} started") for line in journal)
if args.leave:
    sys.exit(0)
if starts <= args.crash_times:
    sys.exit(7)
time.sleep(60)
