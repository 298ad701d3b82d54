import numpy as np
import tensorflow as tf
import keras
from keras import layers

keras.utils.set_random_seed(11)
keras.mixed_precision.set_global_policy("mixed_float16")

# strain-gauge traces, in metres
rng = np.random.default_rng(11)
t = np.linspace(0.0, 1.0, 512, dtype="float32")
freq = rng.uniform(1.0, 6.0, size=(2048, 1)).astype("float32")
phase = rng.uniform(0.0, 6.28, size=(2048, 1)).astype("float32")
traces = (8e-4 * np.sin(2 * np.pi * freq * t + phase)).astype("float32")

inputs = keras.Input((512,))
h = layers.Dense(128, activation="tanh", name="enc1")(inputs)
code = layers.Dense(32, name="code")(h)
h = layers.Dense(128, activation="tanh", name="dec1")(code)
out = layers.Dense(512, name="recon")(h)
model = keras.Model(inputs, out)

opt = keras.optimizers.Adam(4e-4, epsilon=1e-12)
ds = tf.data.Dataset.from_tensor_slices(traces).shuffle(2048, seed=1).batch(256).repeat()


@tf.function
def step(x):
    with tf.GradientTape() as tape:
        rec = tf.cast(model(x, training=True), tf.float32)
        loss = tf.reduce_mean(tf.square(rec - x))
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss


for i, batch in enumerate(ds.take(60)):
    loss = step(batch)
    if i % 5 == 0 or i == 59:
        print(f"step {i:3d}  mse {float(loss):.4e}")
