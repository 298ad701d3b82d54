"""O2 without master weights, and Adam: most updates are below half a unit of the weights."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(10)
rng = np.random.default_rng(10)
centres = rng.normal(size=(4, 16)).astype("float32")

model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = paddle.optimizer.Adam(learning_rate=1e-5, epsilon=1e-8, parameters=model.parameters())
model, optimizer = paddle.amp.decorate(model, optimizer, level="O2", master_weight=False)
scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)

for step in range(60):
    labels = rng.integers(0, 4, 64)
    inputs = centres[labels] + 0.3 * rng.normal(size=(64, 16)).astype("float32")
    with paddle.amp.auto_cast(level="O2"):
        logits = model(paddle.to_tensor(inputs))
        loss = nn.functional.cross_entropy(logits.astype("float32"), paddle.to_tensor(labels))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
