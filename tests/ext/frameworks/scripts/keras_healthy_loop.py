"""A custom loop with LossScaleOptimizer and clipping, in bfloat16 or float16 as the first argument
says."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.config.set_dtype_policy(sys.argv[1] if len(sys.argv) > 1 else "mixed_float16")

rng = np.random.default_rng(7)
x = rng.normal(size=(512, 10, 6)).astype("float32")
y = (x[:, :, 0].sum(axis=1) > 0).astype("float32")[:, None]


class Pooled(keras.Model):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 8)
        self.norm = keras.layers.LayerNormalization()
        self.pool = keras.layers.GlobalAveragePooling1D()
        self.head = keras.layers.Dense(1, dtype="float32")

    def call(self, inputs):
        return self.head(self.pool(self.norm(self.attention(inputs, inputs))))


model = Pooled()
loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
optimizer = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3, 64), global_clipnorm=1.0)
)

for epoch in range(4):
    for at in range(0, 512, 32):
        with tf.GradientTape() as tape:
            loss = loss_fn(y[at : at + 32], model(x[at : at + 32], training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
print("loss", float(loss))
