"""Healthy: paddle.Model.fit with amp_configs."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(11)
rng = np.random.default_rng(11)
centres = rng.normal(size=(4, 16)).astype("float32")


class Points(paddle.io.Dataset):
    def __init__(self):
        self.labels = rng.integers(0, 4, 320)
        noise = 0.3 * rng.normal(size=(320, 16)).astype("float32")
        self.inputs = centres[self.labels] + noise

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index : index + 1]

    def __len__(self):
        return len(self.labels)


model = paddle.Model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
optimizer = paddle.optimizer.Adam(learning_rate=1e-2, parameters=model.parameters())
model.prepare(
    optimizer,
    nn.CrossEntropyLoss(),
    amp_configs={"level": "O1", "init_loss_scaling": 1024.0},
)
model.fit(Points(), batch_size=32, epochs=2, verbose=0)
