"""What watching costs in Keras: the framework's own step against the watched one.

    PYTHONPATH=core $AMPSCOPE_KERAS_PYTHON benchmarks/overhead_keras.py [ROUNDS]

Eager: a step of a custom loop as it is, and with everything recorded and written to a store (goal:
at most 1.3 times). Graph: a batch of `model.fit` as it is, and with the callback that records loss,
scale and skips (goal: at most 1.05). Both kinds run interleaved in one process, a few steps each;
the ratio is taken within each round, and its median and quartiles over all rounds are reported: of
wall time, and of the process's CPU time, to which other processes do little. CPU time is that of a
whole fit, with the making and closing of the callback's run.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.keras import Watch
from ampscope.ext.frameworks.keras.instruments import machine, versions, watching
from ampscope.ext.frameworks.keras.shared_networks import build
from ampscope.ext.frameworks.networks import network
from ampscope.ext.frameworks.recorder import FrameworkRecorder, Writing
from ampscope.records import Cadence, RunSpec
from ampscope.store.writer import RunWriter

RESULTS = Path(__file__).parent / "results" / "overhead_keras.json"
EAGER_STEPS = 5  # a turn
BATCHES = 40  # a turn of fit


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds; the ratio with its quartiles over the rounds."""

    model: str
    policy: str
    way: str  # eager, everything | graph, scale and skips
    parameters: int
    bare_ms: float
    watched_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    cpu_ratio: float  # of the process's CPU time: what another process does to it is small
    cpu_ratio_quartiles: tuple[float, float]
    turns: int
    goal: float


def main() -> None:
    """Measure, print, write."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    results = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        for name, policy in (
            ("lenet", "mixed_float16"), ("transformer", "mixed_float16"), ("wide", "float32"),
        ):  # fmt: skip
            results.append(eager(name, policy, rounds, store))
            print(results[-1], flush=True)
            results.append(graph(name, policy, rounds, store))
            print(results[-1], flush=True)
    report = {
        "versions": versions(),
        "device": machine(RunSpec("")).device_name,
        "cores": os.cpu_count(),
        "results": [asdict(r) for r in results],
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


def eager(name: str, policy: str, rounds: int, store: Path) -> Result:
    """A step of a custom loop."""
    model, optimizer, batch = _made(name, policy)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images, labels = (tf.constant(a) for a in batch)

    def steps() -> float:
        started = time.perf_counter()
        for _ in range(EAGER_STEPS):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(loss_of(labels, model(images, training=True)))
            gradients = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
        return (time.perf_counter() - started) / EAGER_STEPS * 1e3

    writer = RunWriter.create(store, RunSpec(name, framework="keras"))
    writer.start(machine(RunSpec(name)))
    writing = Writing(writer, keeps_evidence=False)
    recorder = FrameworkRecorder(Cadence(1, 0, 0), writing.write_if_due)

    def watched() -> float:
        with watching(recorder, ControlSettings()):
            return steps()

    result = _result(name, policy, "eager, everything", model, steps, watched, rounds, 1.3)
    writer.close()
    return result


def graph(name: str, policy: str, rounds: int, store: Path) -> Result:
    """A batch of fit, without the callbacks that print."""
    model, optimizer, (images, labels) = _made(name, policy)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    data = tf.data.Dataset.from_tensors((images, labels)).repeat()
    watch = Watch(store)
    turn: list[float] = []

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        """Begins after the first batch, which may trace, and the callback's own beginning."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                turn.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            turn.append(time.perf_counter())

    def fit(*callbacks: Any) -> float:
        turn.clear()
        model.fit(data, steps_per_epoch=BATCHES + 1, verbose=0, callbacks=[Clock(), *callbacks])
        return (turn[1] - turn[0]) / BATCHES * 1e3

    way = "graph, scale and skips"
    return _result(name, policy, way, model, fit, lambda: fit(watch), rounds, 1.05)


def _result(
    name: str, policy: str, way: str, model: Any, bare: Callable[[], float],
    watched: Callable[[], float], rounds: int, goal: float,
) -> Result:  # fmt: skip
    bare(), watched()  # kernels are compiled, graphs traced, the first steps written one by one
    watched()
    pairs, cpu_ratios = [], []
    for turn in range(rounds):
        found: dict[bool, tuple[float, float]] = {}
        for is_watched in (False, True) if turn % 2 else (True, False):
            cpu = time.process_time()
            wall = watched() if is_watched else bare()
            found[is_watched] = wall, time.process_time() - cpu
        pairs.append((found[False][0], found[True][0]))
        cpu_ratios.append(found[True][1] / found[False][1])
    ratios = [w / b for b, w in pairs]
    quarters, cpu = (statistics.quantiles(r, n=4) for r in (ratios, cpu_ratios))
    return Result(
        name, policy, way, int(model.count_params()),
        round(statistics.median(b for b, _ in pairs), 3),
        round(statistics.median(w for _, w in pairs), 3),
        round(statistics.median(ratios), 4), (round(quarters[0], 4), round(quarters[2], 4)),
        round(statistics.median(cpu_ratios), 4), (round(cpu[0], 4), round(cpu[2], 4)),
        rounds, goal,
    )  # fmt: skip


def _made(name: str, policy: str) -> tuple[Any, Any, tuple[Any, Any]]:
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    if name == "wide":
        model, batch = _wide()
    else:
        shared = network(name, 0)
        model, batch = build(shared), next(shared.batches())
    optimizer = keras.optimizers.SGD(1e-3)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    return model, optimizer, batch


def _wide() -> tuple[Any, tuple[Any, Any]]:
    """A transformer of two blocks, 256 wide, over 64 positions."""
    inputs = keras.Input((64, 256))
    x = inputs
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 64)(y, y)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(1024, activation="relu")(y)
        x = x + keras.layers.Dense(256)(y)
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x))
    generator = np.random.default_rng(0)
    images = generator.normal(size=(16, 64, 256)).astype(np.float32)
    return keras.Model(inputs, outputs), (images, generator.integers(0, 10, 16))


if __name__ == "__main__":
    main()
