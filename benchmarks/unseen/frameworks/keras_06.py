import numpy as np
import tensorflow as tf
import keras
from keras import layers

keras.utils.set_random_seed(23)
keras.mixed_precision.set_global_policy("mixed_float16")

rng = np.random.default_rng(23)
N, T = 1600, 20
spend = rng.gamma(1.2, 30.0, size=(N, T)).astype("float32")
visits = rng.poisson(9.0, size=(N, T)).astype("float32")
per_visit = spend * (visits > 0) / visits
features = np.stack([np.log1p(spend) - 3.0, visits / 9.0 - 1.0, per_visit / 10.0], axis=-1)
target = (spend.mean(1) > np.median(spend.mean(1))).astype("float32")


class Mixer(layers.Layer):
    def __init__(self, filters):
        super().__init__()
        self.conv = layers.Conv1D(filters, 3, padding="same", activation="relu")
        self.norm = layers.LayerNormalization()

    def call(self, x):
        return self.norm(self.conv(x))


class Churn(keras.Model):
    def __init__(self):
        super().__init__()
        self.m1 = Mixer(16)
        self.m2 = Mixer(32)
        self.pool = layers.GlobalAveragePooling1D()
        self.head = layers.Dense(1, dtype="float32")

    def call(self, x):
        return self.head(self.pool(self.m2(self.m1(x))))


net = Churn()
net.compile(optimizer=keras.optimizers.AdamW(2e-3, weight_decay=1e-4),
            loss=keras.losses.BinaryCrossentropy(from_logits=True))
data = tf.data.Dataset.from_tensor_slices((features, target[:, None])).batch(32)
for e in range(1):
    for i, (fx, ty) in enumerate(data):
        net.reset_metrics()
        print(i, float(net.train_on_batch(fx, ty)))
