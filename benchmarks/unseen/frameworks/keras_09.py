import numpy as np
import keras
from keras import layers

keras.utils.set_random_seed(40)
keras.mixed_precision.set_global_policy("mixed_float16")

rng = np.random.default_rng(40)
rooms = rng.normal(size=(1024, 10)).astype("float32")
coef = rng.normal(size=10).astype("float32")
rent = (900.0 + 250.0 * (rooms @ coef) + rng.normal(0, 150, size=1024)).astype("float32")

inp = keras.Input((10,), name="rooms")
h = layers.Dense(64, activation="relu")(inp)
h = layers.Dense(64, activation="relu")(h)
price = layers.Dense(1, dtype="float32", name="price",
                     bias_initializer=keras.initializers.Constant(900.0))(h)
model = keras.Model(inp, price)

model.compile(
    optimizer=keras.optimizers.Adam(3e-2, global_clipnorm=5.0),
    loss="mse",
    metrics=["mae"],
)
for epoch in range(5):
    h = model.fit(rooms, rent, batch_size=64, epochs=1, verbose=0)
    print("epoch", epoch, {k: round(v[-1], 2) for k, v in h.history.items()})
