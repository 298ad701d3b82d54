"""Smoke plume density maps from coarse sensor images, custom loop."""
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np
import tensorflow as tf
import keras
from keras import layers

keras.utils.set_random_seed(21)
keras.mixed_precision.set_global_policy("mixed_float16")

SETTINGS = {
    "size": 32,
    "batch": 8,
    "steps": 160,
    "optimizer": {"lr": 2e-3, "initial_scale": 1.0, "dynamic_growth_steps": 2000},
    "terms": {"density": 2e-4},
}


def conv_unit(x, filters, name):
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False, name=name + "_conv")(x)
    x = layers.BatchNormalization(name=name + "_bn")(x)
    return layers.ReLU(name=name + "_relu")(x)


def build(size):
    inp = keras.Input((size, size, 2))
    a = conv_unit(inp, 16, "enter")
    b = conv_unit(a, 16, "mid")
    c = layers.Add(name="skip")([a, b])
    d = layers.Conv2D(1, 3, padding="same", name="density")(c)
    out = layers.Activation("linear", dtype="float32", name="to_float")(d)
    return keras.Model(inp, out)


def sample(rng, n, size):
    g = np.linspace(-1, 1, size)
    cx, cy = rng.uniform(-0.7, 0.7, (2, n, 1, 1))
    w = rng.uniform(0.1, 0.3, (n, 1, 1))
    d = np.exp(-((g[None, :, None] - cx) ** 2 + (g[None, None, :] - cy) ** 2) / w)
    s = d + 0.2 * rng.normal(size=d.shape)
    t = np.roll(d, 1, axis=1)
    x = np.stack([s, np.abs(s)], -1)
    return x.astype("float32"), t[..., None].astype("float32")


o = SETTINGS["optimizer"]
model = build(SETTINGS["size"])
opt = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(o["lr"]),
    initial_scale=o["initial_scale"],
    dynamic_growth_steps=o["dynamic_growth_steps"],
)
opt.build(model.trainable_variables)


@tf.function
def step(x, t):
    with tf.GradientTape() as tape:
        pred = model(x, training=True)
        mse = tf.reduce_mean(tf.square(pred - t))
        scaled = opt.scale_loss(SETTINGS["terms"]["density"] * mse)
    grads = tape.gradient(scaled, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return mse


rng = np.random.default_rng(0)
for i in range(SETTINGS["steps"]):
    mse = step(*sample(rng, SETTINGS["batch"], SETTINGS["size"]))
    if i % 20 == 0 or i == SETTINGS["steps"] - 1:
        print(f"{i:4d} mse {float(mse):.5f}")
