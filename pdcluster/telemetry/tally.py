"""Counters, gauges and histograms for what happens to every request: plain numbers that one thread writes, shown to
Prometheus when it asks. Any thread may read them: it copies the series first, as others may appear meanwhile.

`prometheus_client` takes a lock and walks buckets for each value. For a dozen values a request, that costs as much as
parsing it. Names and exposition are the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """One series of a Tally. value: only ever more."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Tally(Collector):
    """A counter. name: without _total."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._name, self._help, self._labels = name, help_text, tuple(labels)
        self._series: dict[tuple[str, ...], Count] = {} if labels else {(): Count()}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """Without values: of a counter without labels."""
        found = self._series.get(values)
        if found is None:
            _check(self._name, self._labels, values)
            found = self._series[values] = Count()
        return found

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, count in self._series.copy().items():
            family.add_metric(values, count.value)
        yield family


class Level(Collector):
    """A gauge without labels."""

    def __init__(self, name: str, help_text: str, *, registry: CollectorRegistry) -> None:
        self._name, self._help = name, help_text
        self.value = 0.0
        registry.register(self)

    def inc(self) -> None:
        self.value += 1

    def dec(self) -> None:
        self.value -= 1

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._help, value=self.value)


class Heap:
    """One series of a Spread. bounds: ascending; a value belongs to the first that is not less."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Of many at once, which costs little more than of one."""
        ascending, before = sorted(values), 0
        for place, bound in enumerate(self.bounds):
            upto = bisect_right(ascending, bound, before)
            self.counts[place] += upto - before
            before = upto
        self.counts[-1] += len(ascending) - before
        self.total += sum(ascending)


class BeforeScrape(Collector):
    """What is counted late is counted now. Register it before the counters that it adds to."""

    def __init__(self, work: Callable[[], None], *, registry: CollectorRegistry) -> None:
        self._work = work
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        self._work()
        return iter(())


class Spread(Collector):
    """A histogram."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._help, self._labels = name, help_text, tuple(labels)
        self._bounds = tuple(float(bound) for bound in buckets)
        self._series: dict[tuple[str, ...], Heap] = {} if labels else {(): Heap(self._bounds)}
        registry.register(self)

    def labels(self, *values: str) -> Heap:
        """Without values: of a histogram without labels."""
        found = self._series.get(values)
        if found is None:
            _check(self._name, self._labels, values)
            found = self._series[values] = Heap(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, heap in self._series.copy().items():
            family.add_metric(values, self._cumulated(heap), heap.total)
        yield family

    def _cumulated(self, heap: Heap) -> list[tuple[str, float]]:
        buckets, so_far = [], 0
        for bound, count in zip((*self._bounds, float("inf")), heap.counts, strict=True):
            so_far += count
            buckets.append((floatToGoString(bound), float(so_far)))  # type: ignore[no-untyped-call]
        return buckets


def _check(name: str, labels: Sequence[str], values: Sequence[str]) -> None:
    if len(labels) != len(values):
        raise ValueError(f"{name} has the labels {', '.join(labels) or 'none'}, not {len(values)} of them")
