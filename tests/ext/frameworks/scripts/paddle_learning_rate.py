"""The learning rate is far too high: fp32 diverges as well."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(8)
rng = np.random.default_rng(8)
truth = rng.normal(size=(16, 1)).astype("float32")

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = paddle.optimizer.SGD(learning_rate=5.0, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=256.0)

for step in range(40):
    inputs = rng.normal(size=(64, 16)).astype("float32")
    with paddle.amp.auto_cast():
        predicted = model(paddle.to_tensor(inputs))
        loss = nn.functional.mse_loss(predicted, paddle.to_tensor(inputs @ truth))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
