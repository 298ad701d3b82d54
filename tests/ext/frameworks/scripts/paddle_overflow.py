"""A layer overflows fp16: its weights make numbers beyond 65,504."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(3)
rng = np.random.default_rng(3)
centres = rng.normal(size=(4, 16)).astype("float32")


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 64)
        self.wide = nn.Linear(64, 64, weight_attr=nn.initializer.Normal(std=1.2e4))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        hidden = paddle.tanh(self.encoder(x))
        return self.head(self.norm(self.wide(hidden)))


model = Net()
optimizer = paddle.optimizer.Adam(learning_rate=1e-3, parameters=model.parameters())
scaler = paddle.amp.GradScaler()

for step in range(40):
    labels = rng.integers(0, 4, 32)
    inputs = centres[labels] + 0.3 * rng.normal(size=(32, 16)).astype("float32")
    with paddle.amp.auto_cast():
        logits = model(paddle.to_tensor(inputs))
        loss = nn.functional.cross_entropy(logits, paddle.to_tensor(labels))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
