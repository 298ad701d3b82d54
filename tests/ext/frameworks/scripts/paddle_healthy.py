"""Healthy: fp16 auto_cast with a GradScaler, as the documentation shows it."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(1)
rng = np.random.default_rng(1)
centres = rng.normal(size=(4, 16)).astype("float32")


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 64)
        self.norm = nn.LayerNorm(64)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(64, 4)

    def forward(self, x):
        return self.fc2(self.act(self.norm(self.fc1(x))))


model = Net()
optimizer = paddle.optimizer.AdamW(learning_rate=1e-3, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
criterion = nn.CrossEntropyLoss()

for step in range(40):
    labels = rng.integers(0, 4, 32)
    inputs = centres[labels] + 0.3 * rng.normal(size=(32, 16)).astype("float32")
    with paddle.amp.auto_cast():
        loss = criterion(model(paddle.to_tensor(inputs)), paddle.to_tensor(labels))
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.minimize(optimizer, scaled)
    optimizer.clear_grad()
