"""Autoencoder of lens surface profiles, reconstruction in micrometres."""
import numpy as np
import paddle
import paddle.nn as nn

paddle.seed(50)
POINTS = 96


class Coder(nn.Layer):
    def __init__(self, code=6):
        super().__init__()
        self.down = nn.Sequential(nn.Linear(POINTS, 768), nn.Tanh(), nn.Linear(768, code))
        self.up = nn.Sequential(nn.Linear(code, 768), nn.Tanh(), nn.Linear(768, POINTS))

    def forward(self, x):
        return self.up(self.down(x))


def profiles(rng, n):
    r = np.linspace(-1, 1, POINTS)
    a, b, c = rng.normal(size=(3, n, 1))
    return (a * r ** 2 + 0.5 * b * r ** 4 + 0.3 * c * np.sin(5 * r)).astype("float32")


net = Coder()
opt = paddle.optimizer.Adam(learning_rate=1e-3, parameters=net.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=2.0 ** 36, incr_every_n_steps=1000)
rng = np.random.default_rng(14)
for k in range(250):
    x = paddle.to_tensor(profiles(rng, 384))
    with paddle.amp.auto_cast(dtype="float16", level="O1"):
        y = net(x)
        loss = ((y - x) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.clear_grad(set_to_zero=False)
    if k % 25 == 0 or k == 249:
        print(k, f"{float(loss):.5f}", flush=True)
