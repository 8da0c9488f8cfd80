"""A cluster on a machine that has no address but ::1: python ipv6_only.py FLAG… Prints what a completion
went over, as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from processes import running

from pdcluster import client as api


def main(flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        targets = Path(folder) / "targets.json"
        where = ("--http", "[::1]:0", "--grpc", "[::1]:0", "--targets", str(targets), "--set=router.console=[::1]:0")
        with running(*where, *flags) as up:
            reply = up.complete("def read(path):", 12)
            with api.Client(up.grpc) as client:
                streamed = list(client.generate("def read(path):", max_tokens=12, temperature=0.0, ignore_eos=True))
            assert [token for output in streamed for token in output.token_ids] == reply["choices"][0]["token_ids"]
            found = [each["targets"][0] for each in json.loads(targets.read_text())]
            for address in found:
                assert address.startswith("[::1]:"), found
                assert httpx.get(f"http://{address}/metrics", trust_env=False, timeout=30.0).status_code == 200
            assert httpx.get(up.console, trust_env=False, timeout=30.0).status_code == 200
            command = (
                sys.executable,
                "-m",
                "pdcluster_router.pdctl",
                "--admin",
                up.admin,
                "get",
                "nodes",
                "-o",
                "name",
            )
            nodes = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True).stdout.split()
            assert up.stop() == 0, up.output()
    print(json.dumps({"usage": reply["usage"]["pdcluster"], "nodes": nodes}))


if __name__ == "__main__":
    main(sys.argv[1:])
