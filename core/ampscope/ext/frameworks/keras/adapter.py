"""What the probe and script processes ask of Keras; see :mod:`ampscope.ext.frameworks.adapters`.

Also here: the probe, and the shared networks as Keras models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ampscope.errors import BadInput, Cancelled
from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.keras import watch
from ampscope.ext.frameworks.keras.watch import watching
from ampscope.ext.frameworks.networks import (
    BLOCKS,
    EPS,
    HEADS,
    POSITIONS,
    SYMBOLS,
    WIDTH,
    Array,
    Network,
    network,
)
from ampscope.ext.frameworks.recorder import Recorder
from ampscope.records import Machine, RunSpec


def machine(spec: RunSpec) -> Machine:
    """Where and with what a run of ``spec`` takes place; TensorFlow sees no other device then."""
    watch.choose_device(spec)
    return watch.machine(spec)


def seed(seed: int) -> None:
    """Seed TensorFlow, NumPy and ``random``."""
    keras.utils.set_random_seed(seed)


# Train a shared network in Keras, watched: the probe.
#
#     for images, labels in batches:
#         with tf.GradientTape() as tape:
#             loss = cross_entropy(labels, model(images, training=True))
#             scaled = optimizer.scale_loss(loss)
#         gradients = tape.gradient(scaled, model.trainable_variables)
#         optimizer.apply(gradients, model.trainable_variables)
#
# ``spec.args`` takes what articles about mixed precision in Keras add:
#
#     --schedule=cosine      keras.optimizers.schedules.CosineDecay over the run, from the usual
#                            rate
#     --schedule=exponential ExponentialDecay, to a tenth over the run
#     --strategy=mirrored    tf.distribute.MirroredStrategy over two logical CPUs (or all GPUs);
#                            every batch is split, and the first replica is what is recorded


POLICIES = {
    "fp32": "float32",
    "fp16": "mixed_float16",
    "fp16-noscaler": "mixed_float16",
    "bf16": "mixed_bfloat16",
}
SCHEDULES = ("constant", "cosine", "exponential")
STRATEGIES = ("none", "mirrored")
NOT_RECORDED = "Single ops, the fp32 shadow and memory are not recorded of Keras."


def probe(spec: RunSpec, recorder: Recorder, is_cancelled: Callable[[], bool]) -> str:
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


# The shared networks as Keras models, with the shared weights; layers are called as in
# :mod:`ampscope.ext.frameworks.networks`.
#
# The last layer computes in float32, as Keras' guide to mixed precision asks: a softmax of half
# logits, or the loss of them, is less exact.


_layers = keras.layers


class Lenet(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """Images (batch, 1, 28, 28), as PyTorch has them; Keras computes channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = _layers.Conv2D(8, 5)
        self.relu1 = _layers.ReLU()
        self.pool1 = _layers.MaxPooling2D(2)
        self.conv2 = _layers.Conv2D(16, 5)
        self.relu2 = _layers.ReLU()
        self.pool2 = _layers.MaxPooling2D(2)
        self.flatten = Flatten()
        self.fc1 = _layers.Dense(64)
        self.relu3 = _layers.ReLU()
        self.fc2 = _layers.Dense(10, dtype="float32")

    def call(self, images: Any) -> Any:
        x = keras.ops.transpose(images, (0, 2, 3, 1))
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        return self.fc2(self.relu3(self.fc1(self.flatten(x))))


class Flatten(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """In PyTorch's order of channels, rows and columns, so that fc1 has the same weights."""

    def call(self, x: Any) -> Any:
        return keras.ops.reshape(keras.ops.transpose(x, (0, 3, 1, 2)), (x.shape[0], -1))


class Mlp(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """Images (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = _layers.Dense(128)
        self.relu1 = _layers.ReLU()
        self.fc2 = _layers.Dense(64)
        self.relu2 = _layers.ReLU()
        self.fc3 = _layers.Dense(10, dtype="float32")

    def call(self, x: Any) -> Any:
        return self.fc3(self.relu2(self.fc2(self.relu1(self.fc1(x)))))


class Attention(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """Softmax of scaled query-key matmuls, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q = _layers.Dense(WIDTH)
        self.k = _layers.Dense(WIDTH)
        self.v = _layers.Dense(WIDTH)
        self.proj = _layers.Dense(WIDTH)

    def call(self, x: Any) -> Any:
        ops, (batch, length, _) = keras.ops, x.shape

        def heads(values: Any) -> Any:
            return ops.transpose(ops.reshape(values, (batch, length, HEADS, -1)), (0, 2, 1, 3))

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / (WIDTH // HEADS) ** 0.5
        mixed = ops.matmul(ops.softmax(scores), v)
        return self.proj(ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (batch, length, WIDTH)))


class Block(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """Pre-norm, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = _layers.LayerNormalization(epsilon=EPS)
        self.attn = Attention()
        self.ln2 = _layers.LayerNormalization(epsilon=EPS)
        self.fc1 = _layers.Dense(2 * WIDTH)
        self.relu = _layers.ReLU()
        self.fc2 = _layers.Dense(WIDTH)

    def call(self, x: Any) -> Any:
        x = x + self.attn(self.ln1(x))
        return x + self.fc2(self.relu(self.fc1(self.ln2(x))))


class Transformer(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """Pixel values (batch, 64), whole numbers of 0 to 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _layers.Embedding(SYMBOLS, WIDTH)
        self.pos = _layers.Embedding(POSITIONS, WIDTH)
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.ln = _layers.LayerNormalization(epsilon=EPS)
        self.head = _layers.Dense(10, dtype="float32")

    def call(self, symbols: Any) -> Any:
        x = self.embed(symbols) + self.pos(keras.ops.arange(symbols.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(keras.ops.mean(self.ln(x), axis=1))


_MODELS: dict[str, Callable[[], Any]] = {"lenet": Lenet, "mlp": Mlp, "transformer": Transformer}
# The word of a weight in PyTorch -> in Keras.
_DENSE = {"weight": "kernel", "bias": "bias"}
_NORM = {"weight": "gamma", "bias": "beta"}


def build(network: Network) -> keras.Model:
    """The model under the dtype policy that is set, with the network's weights."""
    model = _MODELS[network.name]()
    images, _ = next(network.batches())
    model(images)
    for name, value in network.weights.items():
        path, _, word = name.rpartition(".")
        _assign(_layer_at(model, path), word, value)
    return model


def _layer_at(model: Any, path: str) -> Any:
    found = model
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return found


def _assign(layer: Any, word: str, value: Array) -> None:
    if isinstance(layer, _layers.Embedding):
        layer.embeddings.assign(value)
    elif isinstance(layer, _layers.LayerNormalization):
        getattr(layer, _NORM[word]).assign(value)
    elif isinstance(layer, _layers.Conv2D) and word == "weight":
        layer.kernel.assign(np.transpose(value, (2, 3, 1, 0)))
    else:
        getattr(layer, _DENSE[word]).assign(value.T if word == "weight" else value)
