"""Click prediction from wide hashed features; weak signal, many empty columns."""
import numpy as np
import paddle
import paddle.nn as nn
from paddle.io import DataLoader, TensorDataset

np.random.seed(23)
paddle.seed(23)
COLUMNS, ROWS = 1200, 6400


def log_lines(seed):
    rng = np.random.default_rng(seed)
    x = np.zeros((ROWS, COLUMNS), "float32")
    for f in range(12):
        ids = np.minimum(rng.zipf(1.5, ROWS), 99) + 100 * f
        x[np.arange(ROWS), ids] = 1.0
    w = rng.normal(size=COLUMNS) * 0.5
    p = 1.0 / (1.0 + np.exp(-(x @ w - np.median(x @ w))))
    return x, (rng.random(ROWS) < p).astype("float32")[:, None]


class Wide(nn.Layer):
    def __init__(self):
        super().__init__()
        self.fold = nn.Linear(COLUMNS, 768)
        self.deep = nn.Linear(768, 64)
        self.gate = nn.ReLU()
        self.click = nn.Linear(64, 1)

    def forward(self, x):
        return self.click(self.gate(self.deep(self.gate(self.fold(x) - 0.3))))


x, y = log_lines(3)
net = Wide()
opt = paddle.optimizer.Adam(3e-4, parameters=net.parameters())
criterion = nn.BCEWithLogitsLoss(reduction="sum")
scaler = paddle.amp.GradScaler(init_loss_scaling=2.0 ** 17, decr_every_n_nan_or_inf=2)
loader = DataLoader(TensorDataset([paddle.to_tensor(x), paddle.to_tensor(y)]), batch_size=128, shuffle=True)
for epoch in range(5):
    seen, losses = 0, []
    for xb, yb in loader:
        with paddle.amp.auto_cast(dtype="float16"):
            z = net(xb)
        loss = criterion(z.astype("float32"), yb)
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.minimize(opt, scaled)
        opt.clear_grad()
        losses.append(float(loss))
    print(f"epoch {epoch}: first {losses[0]:.1f} last ten {np.mean(losses[-10:]):.2f}", flush=True)
