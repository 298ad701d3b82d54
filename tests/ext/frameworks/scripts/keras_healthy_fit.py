"""A small convolutional network, as the guide to mixed precision has it."""

import keras
import numpy as np

keras.mixed_precision.set_global_policy("mixed_float16")

rng = np.random.default_rng(1)
labels = rng.integers(0, 4, 512)
images = rng.normal(0.0, 0.3, (512, 12, 12, 1)).astype("float32")
for image, label in zip(images, labels):
    row, column = divmod(int(label), 2)
    image[row * 6 : row * 6 + 6, column * 6 : column * 6 + 6] += 1.0

model = keras.Sequential(
    [
        keras.Input((12, 12, 1)),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(4),
        keras.layers.Activation("softmax", dtype="float32"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(images, labels, batch_size=32, epochs=3, validation_split=0.1, verbose=0)
print("accuracy", history.history["accuracy"][-1])
