"""Gradients underflow: fp16 without a scaler, and a loss that is small by its nature."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(6)
rng = np.random.default_rng(6)
truth = rng.normal(size=(16, 1)).astype("float32")

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = paddle.optimizer.Adam(learning_rate=3e-3, parameters=model.parameters(), epsilon=1e-14)

for step in range(60):
    inputs = rng.normal(size=(256, 16)).astype("float32")
    targets = inputs @ truth
    with paddle.amp.auto_cast():
        error = model(paddle.to_tensor(inputs)) - paddle.to_tensor(targets)
        loss = (error * error).mean() * 1e-6
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
