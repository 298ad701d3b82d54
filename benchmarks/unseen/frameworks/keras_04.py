import numpy as np
import keras
from keras.layers import Dense, Input

keras.utils.set_random_seed(21)
keras.mixed_precision.set_global_policy("mixed_float16")

rng = np.random.default_rng(21)
X = rng.normal(size=(960, 24)).astype("float32")
beta = rng.normal(size=(24, 3)).astype("float32")
Y = 2.0 * np.tanh(X @ beta * 0.3) + 0.05 * rng.normal(size=(960, 3)).astype("float32")

model = keras.Sequential([
    Input((24,)),
    Dense(96, activation="selu"),
    Dense(96, activation="selu"),
    Dense(3, dtype="float32"),
])
model.compile(
    optimizer=keras.optimizers.SGD(learning_rate=0.6),
    loss="mse",
)


class PrintLoss(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("loss", logs["loss"])


model.fit(X, Y, batch_size=48, epochs=2, verbose=0, callbacks=[PrintLoss()])
