"""Will a web visit end in a purchase? High-level API."""
import numpy as np
import paddle
import paddle.nn as nn
from paddle.io import Dataset

np.random.seed(30)
paddle.seed(30)

RUN = {
    "epochs": 5,
    "batch_size": 128,
    "lr": 5e-4,
    "amp": {
        "level": "O1",
        "init_loss_scaling": 2.0 ** 26,
        "incr_every_n_steps": 2000,
        "decr_every_n_nan_or_inf": 500,
        "use_dynamic_loss_scaling": True,
    },
}


class Visits(Dataset):
    def __init__(self, n, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        pages = rng.poisson(4.0, (n, 8)).astype("float32")
        age = rng.uniform(18, 80, (n, 1)) / 80.0
        self.x = np.concatenate([pages / 4.0, age], 1).astype("float32")
        score = self.x[:, 0] * self.x[:, 3] - self.x[:, 5] + 1.5 * np.sin(6 * age[:, 0])
        self.y = (score + 0.2 * rng.normal(size=n) > np.median(score)).astype("int64")

    def __getitem__(self, i):
        return self.x[i], self.y[i]

    def __len__(self):
        return len(self.y)


class Branch(nn.Layer):
    def __init__(self, n):
        super().__init__()
        self.a = nn.Linear(n, 2 * n)
        self.b = nn.Linear(2 * n, n)
        self.norm = nn.LayerNorm(n)

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.a(self.norm(x))))


net = nn.Sequential(nn.Linear(9, 384), Branch(384), Branch(384), nn.LayerNorm(384), nn.Linear(384, 2))
model = paddle.Model(net)
model.prepare(
    paddle.optimizer.Adam(RUN["lr"], parameters=net.parameters()),
    nn.CrossEntropyLoss(),
    paddle.metric.Accuracy(),
    amp_configs=RUN["amp"],
)
model.fit(Visits(5120, 1), epochs=RUN["epochs"], batch_size=RUN["batch_size"], verbose=2, log_freq=20)
