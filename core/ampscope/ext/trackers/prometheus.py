"""The runs that are going on, as Prometheus metrics, read from the store when they are scraped.

Nothing is added to the training: it writes its store, and this reads it from another process.
Each sample has the labels ``run``, ``name`` and ``rank``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ampscope.errors import AmpscopeError
from ampscope.ext.trackers.steps import require
from ampscope.numerics.formats import FP16
from ampscope.numerics.histogram import zones
from ampscope.records import Role, RunInfo
from ampscope.store.reader import Reader
from ampscope.store.series import (
    Totals,
    advanced,
    current_runs,
    last_histogram,
    last_lost_shares,
    last_step,
)

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LABELS = ("run", "name", "rank")
ENDED_WITHIN_S = 600.0  # a run that has just ended keeps its last samples for an alert to see
_GAUGES = {
    "loss": "Loss of the newest step",
    "loss_scale": "Loss scale that the newest step used",
    "step_time_seconds": "Wall time of the newest step, less ampscope's own",
    "heartbeat_age_seconds": "Seconds since the last sign of life of the process that trains",
}
_BY_ROLE = {
    "lost_share": "Share of the elements that are zero in half precision and not in the fp32 "
    "shadow, newest step with a shadow",
    "fp16_lost_share": "Share of the non-zero elements that fp16 would round to zero at the loss "
    "scale of their step, newest histogram; 0 for values that are fp16 already",
}
_COUNTERS = {
    "steps": "Steps recorded",
    "skipped_steps": "Optimizer steps that GradScaler left out",
    "nonfinite_steps": "Steps whose loss or gradients held NaN or Inf",
}


class StoreCollector:
    """A custom collector of prometheus_client. Safe for scrapes at the same time."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._totals: dict[str, Totals] = {}

    def collect(self) -> Iterator[Metric]:
        """All samples of one scrape. A store that cannot be read is ``ampscope_store_up 0``."""
        from prometheus_client.core import GaugeMetricFamily

        families = _Families()
        up = 1
        with self._lock:
            try:
                with Reader(self._store) as reader:
                    self._read(reader, families)
            except AmpscopeError:
                up = 0
        yield GaugeMetricFamily("ampscope_store_up", "Whether the store can be read", value=up)
        yield from families.all()

    def _read(self, reader: Reader, families: _Families) -> None:
        infos = current_runs(reader, ENDED_WITHIN_S)
        self._totals = {
            info.id: advanced(reader, info.id, self._totals.get(info.id, Totals()))
            for info in infos
        }
        for info in infos:
            _add_run(families, reader, info, self._totals[info.id])


class _Families:
    """The metric families of one scrape, filled run by run."""

    def __init__(self) -> None:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def families(
            kind: Callable[..., Metric], texts: dict[str, str], labels: tuple[str, ...]
        ) -> dict[str, Metric]:
            return {n: kind(f"ampscope_{n}", text, labels=labels) for n, text in texts.items()}

        info = {"run_info": "State of a run: running, finished, failed, lost …"}
        self._families = (
            families(GaugeMetricFamily, info, (*LABELS, "state"))
            | families(GaugeMetricFamily, _GAUGES, LABELS)
            | families(GaugeMetricFamily, _BY_ROLE, (*LABELS, "role"))
            | families(CounterMetricFamily, _COUNTERS, LABELS)
        )

    def add(self, name: str, labels: tuple[str, ...], value: float | None) -> None:
        """Add a sample; None was not recorded and adds none."""
        if value is not None:
            # Every family kind has add_metric; their common base class does not.
            self._families[name].add_metric(labels, value)  # type: ignore[attr-defined]  # see above

    def all(self) -> Iterator[Metric]:
        yield from self._families.values()


def _add_run(families: _Families, reader: Reader, info: RunInfo, totals: Totals) -> None:
    labels = (info.id, info.title, str(info.spec.rank))
    families.add("run_info", (*labels, info.state.value), 1.0)
    families.add("steps", labels, totals.steps)
    families.add("skipped_steps", labels, totals.skipped)
    families.add("nonfinite_steps", labels, totals.nonfinite)
    if info.heartbeat is not None:
        age_s = max(time.time() - info.heartbeat, 0.0)
        families.add("heartbeat_age_seconds", labels, age_s)
    if (step := last_step(reader, info.id)) is not None:
        families.add("loss", labels, step.loss)
        families.add("loss_scale", labels, step.scale)
        families.add("step_time_seconds", labels, step.step_time_s)
    for role, share in last_lost_shares(reader, info.id).items():
        families.add("lost_share", (*labels, role.value), share)
    for role in (Role.ACTIVATION, Role.GRAD_OUTPUT, Role.WEIGHT_GRAD):
        row = last_histogram(reader, info.id, role)
        found = zones(row, FP16) if row is not None else None
        if found is not None and found.nonzero:
            families.add("fp16_lost_share", (*labels, role.value), found.lost / found.nonzero)


def serve(store: Path, host: str, port: int) -> tuple[str, Callable[[], None]]:
    """Listen in a thread of its own. Returns the address and what ends it. Raises BadInput without
    prometheus_client, OSError when the port is taken."""
    require("prometheus_client", "prometheus")
    from prometheus_client import CollectorRegistry, start_http_server

    registry, collector = CollectorRegistry(), StoreCollector(store)
    for _ in collector.collect():  # counts the totals of long runs before the first scrape
        pass
    registry.register(collector)
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"http://{host}:{server.server_port}/metrics", stop
