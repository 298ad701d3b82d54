"""A norm by hand whose squares leave the range of half precision: what it puts out is zero."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(3)
rng = np.random.default_rng(3)
centres = 2000.0 * rng.normal(size=(4, 64)).astype("float32")


class RootMeanSquare(nn.Layer):
    def forward(self, x):
        return x * paddle.rsqrt((x * x).mean(axis=-1, keepdim=True) + 1e-5)


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(64, 64)
        self.norm = RootMeanSquare()
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x)))


model = Net()
optimizer = paddle.optimizer.Adam(learning_rate=1e-2, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)

for step in range(40):
    labels = rng.integers(0, 4, 32)
    inputs = centres[labels] + 400.0 * rng.normal(size=(32, 64)).astype("float32")
    with paddle.amp.auto_cast():
        logits = model(paddle.to_tensor(inputs))
        loss = nn.functional.cross_entropy(logits, paddle.to_tensor(labels))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
