"""O2 without master weights, and RMSProp: its averages of squared gradients are fp16 and overflow."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(9)
rng = np.random.default_rng(9)
truth = rng.normal(size=(16, 1)).astype("float32")

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = paddle.optimizer.RMSProp(
    learning_rate=1e-3, epsilon=1e-8, parameters=model.parameters()
)
model, optimizer = paddle.amp.decorate(model, optimizer, level="O2", master_weight=False)

for step in range(60):
    inputs = rng.normal(size=(512, 16)).astype("float32")
    targets = inputs @ truth
    with paddle.amp.auto_cast(level="O2"):
        predicted = model(paddle.to_tensor(inputs))
    error = predicted.astype("float32") - paddle.to_tensor(targets)
    loss = (error * error).sum()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
