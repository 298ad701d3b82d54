"""Bird species from short mono clips, field recorders; envelope features per filter."""
import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.io import DataLoader, Dataset

np.random.seed(15)
paddle.seed(15)
SPECIES, SAMPLES = 5, 320


class Clips(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        t = np.arange(SAMPLES) / 16.0
        self.y = rng.integers(0, SPECIES, n).astype("int64")
        pitch = np.array([1.3, 2.1, 3.4, 4.6, 6.2])[self.y]
        phase = rng.uniform(0, 6.3, n)
        loud = rng.uniform(0.05, 0.8, n)
        x = loud[:, None] * np.sin(pitch[:, None] * t + phase[:, None]) + 0.1 * rng.normal(size=(n, SAMPLES))
        x[rng.random(n) < 0.04] = 0.0
        self.x = x[:, None].astype("float32")

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Envelope(nn.Layer):
    """Each filter's response relative to its own loudest point."""

    def __init__(self, floor):
        super().__init__()
        self.floor = floor

    def forward(self, h):
        loudest = h.abs().max(axis=-1, keepdim=True)
        return h / (loudest + self.floor)


class Ear(nn.Layer):
    def __init__(self, floor=1e-8):
        super().__init__()
        self.cochlea = nn.Sequential(nn.Conv1D(1, 16, 31, padding=15, bias_attr=False), Envelope(floor))
        self.cortex = nn.Sequential(nn.Conv1D(16, 24, 9, stride=4), nn.ReLU(), nn.Conv1D(24, 24, 9, stride=4), nn.ReLU())
        self.name_it = nn.Linear(24, SPECIES)

    def forward(self, x):
        return self.name_it(self.cortex(self.cochlea(x)).max(axis=-1))


ear = Ear()
opt = paddle.optimizer.Momentum(0.05, momentum=0.9, parameters=ear.parameters(),
                                grad_clip=nn.ClipGradByGlobalNorm(1.0))
scaler = paddle.amp.GradScaler()
loader = DataLoader(Clips(1600, 2), batch_size=32, shuffle=True, drop_last=True)
step = 0
for epoch in range(4):
    total = 0.0
    for xb, yb in loader:
        with paddle.amp.auto_cast(dtype="float16"):
            loss = F.cross_entropy(ear(xb), yb)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.clear_grad()
        total += float(loss)
        step += 1
    print(f"epoch {epoch} step {step} mean loss {total / len(loader):.4f}", flush=True)
