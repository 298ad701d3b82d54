"""Two networks, each with an optimizer that scales its loss: one begins far too high, one low."""

import keras
import numpy as np
import tensorflow as tf

keras.mixed_precision.set_global_policy("mixed_float16")
keras.utils.set_random_seed(6)
rng = np.random.default_rng(6)
nets = [keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)]) for _ in range(2)]
optimizers = [
    keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=first, dynamic_growth_steps=6
    )
    for first in (2.0**24, 2.0**4)
]

for step in range(20):
    inputs = rng.normal(size=(8, 16)).astype("float32")
    for net, optimizer in zip(nets, optimizers):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.cast(net(inputs), "float32")))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, net.trainable_variables), net.trainable_variables)
