"""Healthy: O2 with master weights, a schedule, accumulation over two batches, step and update."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(2)
rng = np.random.default_rng(2)
centres = rng.normal(size=(4, 1, 8, 8)).astype("float32")

model = nn.Sequential(
    nn.Conv2D(1, 8, 3, padding=1),
    nn.BatchNorm2D(8),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(8 * 8 * 8, 4),
)
schedule = paddle.optimizer.lr.StepDecay(learning_rate=0.02, step_size=10, gamma=0.5)
optimizer = paddle.optimizer.Momentum(learning_rate=schedule, parameters=model.parameters())
model, optimizer = paddle.amp.decorate(models=model, optimizers=optimizer, level="O2")
scaler = paddle.amp.GradScaler(init_loss_scaling=256.0)

for step in range(60):
    labels = rng.integers(0, 4, 16)
    images = centres[labels] + 0.3 * rng.normal(size=(16, 1, 8, 8)).astype("float32")
    with paddle.amp.auto_cast(level="O2"):
        logits = model(paddle.to_tensor(images))
        loss = nn.functional.cross_entropy(logits.astype("float32"), paddle.to_tensor(labels))
    scaler.scale(loss / 2).backward()
    if step % 2 == 1:
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        schedule.step()
