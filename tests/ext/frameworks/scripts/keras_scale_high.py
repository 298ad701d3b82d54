"""A loss scale of 2**40, "to be on the safe side"."""

import keras
import numpy as np
import tensorflow as tf

keras.config.set_dtype_policy("mixed_float16")

rng = np.random.default_rng(0)
x = rng.normal(size=(1024, 20)).astype("float32")
y = (x @ rng.normal(size=20) > 0).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1024, seed=1).batch(32).repeat()

model = keras.Sequential(
    [
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(2),
        keras.layers.Activation("linear", dtype="float32"),
    ]
)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**40)


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = loss_fn(labels, predictions)
        scaled_loss = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled_loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


for step, (images, labels) in enumerate(dataset.take(40)):
    loss = train_step(images, labels)
print("loss", float(loss))
