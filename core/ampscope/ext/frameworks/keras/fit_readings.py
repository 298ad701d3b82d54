"""What a running ``model.fit`` shows without a change to its graph: variables that Keras keeps.

The loss of one batch is read off the running mean that ``fit`` reports: total and count before and
after. Once a loss was NaN, that mean is NaN until the epoch ends, and later losses are not known. A
training step of the user's own, which keeps no such mean, reports its loss itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ampscope.ext.frameworks.keras.optimizer_state import calls, inner, is_scaler
from ampscope.ext.frameworks.keras.values import scalar
from ampscope.records import StepRecord

Read = Callable[[], float]


class FitReadings:
    """Reads one training; :meth:`begin` once, then :meth:`read` after every batch."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._read: dict[str, Read] = {}
        self._mean = (0.0, 0.0)
        self._scale: float | None = None
        self._steps = 0.0
        self._schedule: Any = None
        self._rate: float | None = None
        self._means: dict[str, Read] = {}  # of the loss: total and count

    def begin(self) -> None:
        """Before the first batch."""
        optimizer = self._model.optimizer
        if optimizer is None:
            return
        if is_scaler(optimizer):
            self._scale = float(optimizer.initial_scale)
        stepping = inner(optimizer)
        if not isinstance(stepping._learning_rate, keras.Variable):
            # A schedule is a dozen kernels: one graph is four times as fast.
            self._schedule = tf.function(stepping._get_current_learning_rate, autograph=False)
            self._rate = float(self._schedule())
        self._prepare()
        if self._read:  # built before: a training that goes on
            self._steps = self._read["steps"]()
            self._scale = self._read["scale"]() if "scale" in self._read else None

    def begin_epoch(self) -> None:
        """Keras has reset its means, or has not."""
        self._mean = self._mean_now()

    def read(self, logs: Any, step: int) -> StepRecord:
        """After a batch, or ``steps_per_execution`` of them, without their times."""
        self._prepare()
        now = {name: read() for name, read in self._read.items()}
        scale, self._scale = self._scale, now.get("scale", self._scale)
        before, self._steps = self._steps, now.get("steps", self._steps)
        return StepRecord(
            step,
            loss=self._loss(logs),
            scale=scale,
            growth_counter=int(now["counter"]) if "counter" in now else None,
            skipped="counter" in now and now["steps"] == before,
            lr=now["lr"] if "lr" in now else self._scheduled(),
        )

    def _scheduled(self) -> float | None:
        """The rate of the step that has ended; the schedule itself is at the next one."""
        if self._schedule is None:
            return None
        rate, self._rate = self._rate, float(self._schedule())
        return rate

    def _prepare(self) -> None:
        """Readers of what has been built by now."""
        optimizer = self._model.optimizer
        if self._read or optimizer is None or not optimizer.built:
            return
        stepping = inner(optimizer)
        self._read["steps"] = _reader(calls(optimizer))
        if is_scaler(optimizer):
            self._read["scale"] = _reader(optimizer.dynamic_scale)
            self._read["counter"] = _reader(optimizer.step_counter)
        if self._schedule is None:
            self._read["lr"] = _reader(stepping._learning_rate)

    def _loss(self, logs: Any) -> float | None:
        total, count = self._mean_now()
        before, self._mean = self._mean, (total, count)
        if count < before[1]:
            before = (0.0, 0.0)
        if count > before[1]:
            if not math.isfinite(before[0]):
                return None
            return (total - before[0]) / (count - before[1])
        return scalar(logs.get("loss")) if isinstance(logs, dict) else None

    def _mean_now(self) -> tuple[float, float]:
        tracker = getattr(self._model, "_loss_tracker", None)
        if tracker is None:
            return 0.0, 0.0
        if "total" not in self._means:
            self._means = {"total": _reader(tracker.total), "count": _reader(tracker.count)}
        return self._means["total"](), self._means["count"]()


def _reader(variable: Any) -> Read:
    """A fast read of a Keras variable. Of one that each replica adds to on its own, the sum; of any
    other that several devices have, the first."""
    value = variable._value
    if isinstance(value, tf.distribute.DistributedValues):
        parts = [_read_one(part) for part in value.values]
        if value.aggregation == tf.VariableAggregation.SUM:
            return lambda: sum(read() for read in parts)
        return parts[0]
    return _read_one(value)


def _read_one(value: Any) -> Read:
    handle, dtype = value.handle, value.dtype
    return lambda: float(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)._numpy())
