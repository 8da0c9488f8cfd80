"""A tensor-parallel engine whose ranks all live in this process, one worker thread each. For tests of what they
compute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from pdcluster.core.step import StepPlan, StepResult
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.model.collective import Ranks, host_store, join_store

TIMEOUT_S = 60.0


class EngineGroup:
    """Looks like rank 0's engine to a Driver; every plan goes to all ranks."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        store = host_store(TIMEOUT_S)

        def start(rank: int) -> Engine:
            own = store if rank == 0 else join_store(store.port, TIMEOUT_S)
            return Engine(config, group=Ranks(rank, size, own, "cpu", TIMEOUT_S))

        with ThreadPoolExecutor(size) as pool:
            self.engines = list(pool.map(start, range(size)))
        self.layout, self.num_pages = self.engines[0].layout, self.engines[0].num_pages

    def step(self, plan: StepPlan) -> StepResult:
        for engine in self.engines:
            engine.launch(plan)
        results = [engine.collect(TIMEOUT_S) for engine in self.engines]
        return results[0]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@contextmanager
def engine_group(config: EngineConfig, size: int):
    group = EngineGroup(config, size)
    try:
        yield group
    finally:
        group.close()
