import numpy as np
import tensorflow as tf
import keras
from keras import layers, ops

keras.utils.set_random_seed(3)
keras.mixed_precision.set_global_policy("mixed_float16")


class SecondOrder(layers.Layer):
    def __init__(self, rank, **kw):
        super().__init__(**kw)
        self.rank = rank

    def build(self, shape):
        self.factors = self.add_weight(
            shape=(shape[-1], self.rank), initializer="glorot_uniform", name="factors")

    def call(self, x):
        s = ops.matmul(x, self.factors)
        q = ops.matmul(ops.square(x * 0.05), ops.square(self.factors))
        return 0.5 * (ops.square(s) - q)


class Tower(layers.Layer):
    def __init__(self, width, **kw):
        super().__init__(**kw)
        self.pairs = SecondOrder(24)
        self.norm = layers.LayerNormalization()
        self.fc = layers.Dense(width, activation="gelu")

    def call(self, x):
        return self.fc(self.norm(self.pairs(x)))


class Ranker(keras.Model):
    def __init__(self):
        super().__init__()
        self.linear = layers.Dense(8)
        self.linear_norm = layers.LayerNormalization()
        self.tower = Tower(64)
        self.head = layers.Dense(1, dtype="float32")

    def call(self, x):
        a = self.linear_norm(self.linear(x))
        b = self.tower(x)
        return self.head(ops.concatenate([a, b], axis=-1))


rng = np.random.default_rng(3)
# visits, dwell seconds, basket value, ...
x = rng.gamma(2.0, 90.0, size=(1536, 40)).astype("float32")
w = rng.normal(size=(40, 1)).astype("float32")
z = (x - x.mean(0)) / x.std(0)
y = ((z @ w) > 0).astype("float32")

model = Ranker()
opt = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(3e-3))
bce = keras.losses.BinaryCrossentropy(from_logits=True)


@tf.function
def train_step(xb, yb):
    with tf.GradientTape() as tape:
        loss = bce(yb, model(xb, training=True))
        scaled = opt.scale_loss(loss)
    g = tape.gradient(scaled, model.trainable_variables)
    opt.apply(g, model.trainable_variables)
    return loss


model(x[:2])
opt.build(model.trainable_variables)
for n in range(60):
    idx = rng.integers(0, len(x), size=128)
    l = train_step(tf.constant(x[idx]), tf.constant(y[idx]))
    if n % 6 == 0 or n == 59:
        print(n, float(l))
