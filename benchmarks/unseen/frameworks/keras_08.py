import numpy as np
import tensorflow as tf
import keras

keras.utils.set_random_seed(33)
keras.mixed_precision.set_global_policy("mixed_float16")

gen = np.random.default_rng(33)
X = gen.uniform(-1, 1, size=(800, 6)).astype("float32")
Y = (np.sin(3 * X[:, :1]) + X[:, 1:2] * X[:, 2:3]).astype("float32")


class Block(keras.layers.Layer):
    def __init__(self, d):
        super().__init__()
        self.up = keras.layers.Dense(2 * d, activation="silu")
        self.down = keras.layers.Dense(d)

    def call(self, x):
        return x + self.down(self.up(x))


class Reg(keras.Model):
    def __init__(self):
        super().__init__()
        self.inp = keras.layers.Dense(32)
        self.b1 = Block(32)
        self.b2 = Block(32)
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.b2(self.b1(self.inp(x))))


model = Reg()
model(X[:1])
optimizer = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(3e-3), initial_scale=2.0 ** 60)
optimizer.build(model.trainable_variables)
mse = keras.losses.MeanSquaredError()


@tf.function
def train(xb, yb):
    with tf.GradientTape() as tape:
        loss = mse(yb, model(xb, training=True))
        obj = optimizer.scale_loss(loss)
    grads = tape.gradient(obj, model.trainable_variables)
    optimizer.apply(grads, model.trainable_variables)
    return loss


for k in range(36):
    pick = gen.integers(0, 800, 80)
    v = train(tf.constant(X[pick]), tf.constant(Y[pick]))
    if k % 3 == 2:
        print("iter", k, "mse", float(v))
