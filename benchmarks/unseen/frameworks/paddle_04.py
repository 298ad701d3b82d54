import numpy as np
import paddle
import paddle.nn as nn
from paddle.io import Dataset, DataLoader

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(24)


class Counts(Dataset):
    def __init__(self, n=1600):
        r = np.random.RandomState(24)
        self.x = r.normal(size=(n, 16)).astype("float32")
        rate = np.exp(2.25 + 0.2 * self.x[:, 0] - 0.15 * self.x[:, 5])
        with np.errstate(divide="ignore"):
            self.y = np.log(r.poisson(rate)).astype("float32")[:, None]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


model = nn.Sequential(
    nn.Linear(16, 64), nn.GELU(),
    nn.Linear(64, 64), nn.GELU(),
    nn.Linear(64, 1),
)
loader = DataLoader(Counts(), batch_size=32, shuffle=False, num_workers=0)
opt = paddle.optimizer.Adam(learning_rate=3e-3, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
mse = nn.MSELoss()

for n, (xb, yb) in enumerate(loader):
    with paddle.amp.auto_cast(level="O1", dtype="float16"):
        loss = mse(model(xb), yb)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.clear_grad()
    print(f"{n:02d} {float(loss):.5f}")
