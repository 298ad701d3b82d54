"""Level of a water tank from pump telemetry; GRU-free windowed regression."""
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np
import tensorflow as tf
import keras
from keras import layers

keras.utils.set_random_seed(2)
keras.mixed_precision.set_global_policy("mixed_float16")

WINDOW, BATCH, STEPS = 40, 64, 200


def windows(rng, n):
    flow = rng.normal(size=(n, WINDOW)).cumsum(axis=1) * 0.2
    duty = (rng.random((n, WINDOW)) < 0.3).astype("float32")
    level = 4.0 + 0.6 * (flow * duty).mean(axis=1) + 0.5 * flow[:, -1]
    x = np.stack([flow, duty], -1).astype("float32")
    return x, level.astype("float32")[:, None]


class Telemetry(keras.Model):
    def __init__(self):
        super().__init__()
        self.c1 = layers.Conv1D(24, 5, activation="relu", padding="causal", name="c1")
        self.c2 = layers.Conv1D(24, 5, activation="relu", padding="causal", dilation_rate=4, name="c2")
        self.flat = layers.Flatten()
        self.fc = layers.Dense(48, activation="relu", name="fc")
        self.level = layers.Dense(1, dtype="float32", name="level")

    def call(self, x):
        return self.level(self.fc(self.flat(self.c2(self.c1(x)))))


net = Telemetry()
net(np.zeros((1, WINDOW, 2), "float32"))
opt = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3), initial_scale=2.0 ** 24)
opt.build(net.trainable_variables)


@tf.function
def step(x, t):
    with tf.GradientTape() as tape:
        err = net(x, training=True) - t
        loss = tf.reduce_sum(tf.square(err))
        scaled = opt.scale_loss(loss)
    grads = tape.gradient(scaled, net.trainable_variables)
    opt.apply_gradients(zip(grads, net.trainable_variables))
    return loss


rng = np.random.default_rng(31)
for i in range(STEPS):
    loss = step(*windows(rng, BATCH))
    if i % 20 == 0 or i == STEPS - 1:
        print(f"step {i} loss {float(loss):.2f} scale {float(opt.dynamic_scale):.0f}", flush=True)
