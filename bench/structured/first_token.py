"""How much later the first token comes with a schema that nobody asked before: over real processes, bootstrap, prefill
and decode node and router, in turns with none."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness.report import Row
from bench.structured.tenants import HONEST, connect, headers_of, processes

NUM_PROPERTIES = 100
# Of the first token.
ALLOWED_S = 0.020


def rows(num_asked: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, processes(Path(folder)) as (address, model):
        ttft_s(address, model, schema(-1))
        plain, shaped = list[float](), list[float]()
        for number in range(num_asked):
            plain.append(ttft_s(address, model, None))
            shaped.append(ttft_s(address, model, schema(number)))
    later = statistics.median(shaped) - statistics.median(plain)
    return [
        Row("first token, median", "without a schema", statistics.median(plain) * 1e3, "ms", better="less"),
        Row(
            "first token later, median", f"a new schema of {NUM_PROPERTIES} properties", later * 1e3, "ms",
            against="allowed", against_value=ALLOWED_S * 1e3, better="less", goal=1.0,
        ),
    ]  # fmt: skip


def schema(number: int) -> dict[str, Any]:
    kinds = ("string", "integer", "boolean", "number")
    named = {f"field_{number}_{at}": {"type": kinds[at % 4]} for at in range(NUM_PROPERTIES)}
    return {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}


def ttft_s(address: str, model: str, asked: dict[str, Any] | None) -> float:
    """Seconds until the first text of a stream."""
    shape = {} if asked is None else {"structured_outputs": {"json": asked}}
    body = {"model": model, "prompt": "Fill in:", "max_tokens": 8, "stream": True, **shape}
    connection = connect(address)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers_of(HONEST))
    reply = connection.getresponse()
    line = reply.readline()
    took_s = time.perf_counter() - began
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {line.decode(errors='replace')}")
    reply.read()
    connection.close()
    return took_s
