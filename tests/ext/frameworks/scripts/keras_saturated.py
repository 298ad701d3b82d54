"""A probability that rounds to 1 in half precision, and a loss of one's own that takes log(1 - p)."""

import keras
import numpy as np
from keras import ops

keras.utils.set_random_seed(3)
keras.mixed_precision.set_global_policy("mixed_float16")


def likelihood(target, chance):
    return -ops.mean(target * ops.log(chance) + (1.0 - target) * ops.log(1.0 - chance))


rng = np.random.default_rng(3)
readings = rng.normal(size=(960, 8)).astype("float32")
readings[:, 0] = rng.choice([-5.0, 5.0], 960)
labels = (readings[:, :1] > 0).astype("float32")

inputs = keras.Input((8,), name="readings")
chance = keras.layers.Dense(1, activation="sigmoid", name="chance")(inputs)
model = keras.Model(inputs, chance)
model.compile(optimizer=keras.optimizers.SGD(0.5), loss=likelihood)
model.fit(readings, labels, batch_size=32, epochs=3, verbose=0)
