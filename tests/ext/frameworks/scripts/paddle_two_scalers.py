"""Two networks, each with a scaler of its own: one begins far too high, one low."""

import numpy as np
import paddle
from paddle import nn

paddle.seed(6)
rng = np.random.default_rng(6)
nets = [nn.Linear(16, 4), nn.Linear(16, 4)]
optimizers = [paddle.optimizer.SGD(learning_rate=0.01, parameters=net.parameters()) for net in nets]
scalers = [
    paddle.amp.GradScaler(init_loss_scaling=first, incr_every_n_steps=6)
    for first in (2.0**24, 2.0**4)
]

for step in range(20):
    inputs = rng.normal(size=(8, 16)).astype("float32")
    for net, optimizer, scaler in zip(nets, optimizers, scalers):
        with paddle.amp.auto_cast():
            loss = net(paddle.to_tensor(inputs)).square().sum()
        scaled = scaler.scale(loss)
        scaled.backward()
        if scaler is scalers[0]:
            scaler.minimize(optimizer, scaled)
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.clear_grad()
