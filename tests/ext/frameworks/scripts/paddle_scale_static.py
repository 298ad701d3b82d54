"""A constant loss scale of 2^24: every step overflows, and nothing ever lowers it."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(5)
rng = np.random.default_rng(5)
centres = rng.normal(size=(4, 16)).astype("float32")

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = paddle.optimizer.SGD(learning_rate=0.05, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**24, use_dynamic_loss_scaling=False)

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
