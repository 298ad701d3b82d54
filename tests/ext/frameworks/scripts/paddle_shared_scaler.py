"""Two networks and one scaler: the first overflows, the second is stepped last."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(6)
rng = np.random.default_rng(6)
loud, quiet = nn.Linear(16, 4), nn.Linear(16, 4)
optimizers = [
    paddle.optimizer.SGD(learning_rate=0.01, parameters=net.parameters()) for net in (loud, quiet)
]
scaler = paddle.amp.GradScaler(
    init_loss_scaling=2.0**16, incr_every_n_steps=4, decr_every_n_nan_or_inf=1
)

for step in range(24):
    inputs = rng.normal(size=(8, 16)).astype("float32")
    for net, optimizer, factor in zip((loud, quiet), optimizers, (30.0, 1e-4)):
        with paddle.amp.auto_cast():
            loss = factor * net(paddle.to_tensor(inputs)).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.clear_grad()
    scaler.update()
