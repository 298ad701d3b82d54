"""What the probe and script processes ask of Keras; see :mod:`ampscope.ext.frameworks.adapters`.

The probe trains a shared network, watched. Its ``spec.args`` are what articles about mixed
precision in Keras add:

    --schedule=cosine      keras.optimizers.schedules.CosineDecay over the run, from the usual
                           rate
    --schedule=exponential ExponentialDecay, to a tenth over the run
    --strategy=mirrored    tf.distribute.MirroredStrategy over two logical CPUs (or all GPUs);
                           every batch is split, and the first replica is what is recorded
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ampscope.errors import BadInput, Cancelled
from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.keras import instruments
from ampscope.ext.frameworks.keras.instruments import watching
from ampscope.ext.frameworks.keras.shared_networks import build
from ampscope.ext.frameworks.networks import Network, network
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.records import Machine, RunSpec

POLICIES = {
    "fp32": "float32",
    "fp16": "mixed_float16",
    "fp16-noscaler": "mixed_float16",
    "bf16": "mixed_bfloat16",
}
SCHEDULES = ("constant", "cosine", "exponential")
STRATEGIES = ("none", "mirrored")
NOT_RECORDED = "Single ops, the fp32 shadow and memory are not recorded of Keras."


def machine(spec: RunSpec) -> Machine:
    """Where and with what a run of ``spec`` takes place; TensorFlow sees no other device then."""
    instruments.choose_device(spec)
    return instruments.machine(spec)


def seed(seed: int) -> None:
    """Seed TensorFlow, NumPy and ``random``."""
    keras.utils.set_random_seed(seed)


def probe(spec: RunSpec, recorder: FrameworkRecorder, is_cancelled: Callable[[], bool]) -> str:
    """Train; a sentence on what is not recorded."""
    policy = POLICIES.get(spec.precision)
    if policy is None:
        raise BadInput(f"Keras trains in {', '.join(POLICIES)}, not in {spec.precision!r}.")
    schedule, strategy = _choice(spec, "schedule", SCHEDULES), _choice(spec, "strategy", STRATEGIES)
    shared = network(spec.workload, spec.seed)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        with _placed(strategy).scope():
            model = build(shared)
            optimizer = _optimizer(spec, _rate(shared, schedule, spec.steps))
            optimizer.build(model.trainable_variables)
        with watching(recorder, ControlSettings()):
            _train(spec, shared, model, optimizer, is_cancelled)
    finally:
        keras.config.set_dtype_policy(before)
    return NOT_RECORDED


def _train(
    spec: RunSpec, shared: Network, model: Any, optimizer: Any, is_cancelled: Callable[[], bool]
) -> None:
    batches = shared.batches()
    strategy = model.distribute_strategy
    for _ in range(spec.steps):
        if is_cancelled():
            raise Cancelled("Cancelled; the steps before are kept.")
        images, labels = next(batches)
        count = strategy.num_replicas_in_sync

        def part(context: Any, images: Any = images, labels: Any = labels) -> Any:
            at, share = context.replica_id_in_sync_group, len(labels) // count  # noqa: B023
            chosen = slice(at * share, (at + 1) * share)
            return tf.constant(images[chosen]), tf.constant(labels[chosen])

        data = strategy.experimental_distribute_values_from_function(part)
        strategy.run(_step, (spec, model, optimizer, *data))


def _step(spec: RunSpec, model: Any, optimizer: Any, images: Any, labels: Any) -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses) * spec.loss_factor / replicas
        scaled = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)


def _optimizer(spec: RunSpec, rate: Any) -> Any:
    optimizer = keras.optimizers.SGD(rate)
    if spec.precision != "fp16":
        return optimizer
    return keras.optimizers.LossScaleOptimizer(
        optimizer,
        initial_scale=spec.scaler.init_scale,
        dynamic_growth_steps=spec.scaler.growth_interval,
    )


def _rate(shared: Network, schedule: str, steps: int) -> Any:
    if schedule == "cosine":
        return keras.optimizers.schedules.CosineDecay(shared.lr, steps)
    if schedule == "exponential":
        return keras.optimizers.schedules.ExponentialDecay(shared.lr, steps, 0.1)
    return shared.lr


def _placed(strategy: str) -> Any:
    """The strategy; logical CPUs exist only if nothing has run in TensorFlow before."""
    if strategy != "mirrored":
        return tf.distribute.get_strategy()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        return tf.distribute.MirroredStrategy()
    split = [tf.config.LogicalDeviceConfiguration()] * 2
    with contextlib.suppress(RuntimeError):  # TensorFlow has begun: there are two, or never will be
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, split)
    if len(tf.config.list_logical_devices("CPU")) < 2:
        raise BadInput("TensorFlow has begun with one logical CPU; two replicas need two.")
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _choice(spec: RunSpec, name: str, allowed: tuple[str, ...]) -> str:
    chosen = allowed[0]
    for word in spec.args:
        key, _, value = word.removeprefix("--").partition("=")
        if key == name:
            chosen = value
    if chosen not in allowed:
        raise BadInput(f"--{name} is one of {', '.join(allowed)}, not {chosen!r}.")
    return chosen
