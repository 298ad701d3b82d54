"""P-wave arrival (early / middle / late / none) from 16-bit digitiser counts, in order of recording."""
import numpy as np
import paddle
import paddle.nn as nn

paddle.seed(4)
ARGS = {"length": 512, "filters": 48, "taps": 25, "std": 0.5, "batch": 16, "steps": 180, "lr": 5e-4}


def record(rng, n, day):
    t = np.arange(ARGS["length"])
    x = rng.normal(size=(n, 1, ARGS["length"])) * 120.0
    y = rng.integers(0, 4, n)
    for i in range(n):
        if y[i] == 3:
            continue
        start = 40 + 140 * y[i] + rng.integers(0, 25)
        amp = rng.uniform(150, 500)
        if day > 45 and rng.random() < 0.25:
            amp = rng.uniform(28000, 40000)
        wave = amp * np.exp(-(t - start) / 30.0) * np.sin((t - start) / 6.0)
        x[i, 0] += np.where(t >= start, wave, 0.0)
    return x.astype("float32"), y.astype("int64")


class FilterBank(nn.Layer):
    def __init__(self, a):
        super().__init__()
        init = paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, a["std"]))
        self.taps = nn.Conv1D(1, a["filters"], a["taps"], padding=12, weight_attr=init)
        self.level = nn.GroupNorm(4, a["filters"])

    def forward(self, x):
        return nn.functional.silu(self.level(self.taps(x)))


class Picker(nn.Layer):
    def __init__(self, a):
        super().__init__()
        self.bank = FilterBank(a)
        self.narrow = nn.Conv1D(a["filters"], 48, 9, stride=8, padding=4)
        self.head = nn.Sequential(nn.Linear(48 * a["length"] // 8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        h = nn.functional.relu(self.narrow(self.bank(x)))
        return self.head(paddle.flatten(h, 1))


net = Picker(ARGS)
opt = paddle.optimizer.Adam(ARGS["lr"], parameters=net.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=2.0 ** 14)
rng = np.random.default_rng(12)
for day in range(ARGS["steps"]):
    xb, yb = record(rng, ARGS["batch"], day)
    with paddle.amp.auto_cast(dtype="float16", level="O1"):
        logits = net(paddle.to_tensor(xb))
        loss = nn.functional.cross_entropy(logits, paddle.to_tensor(yb))
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.minimize(opt, scaled)
    opt.clear_grad()
    if day % 10 == 0 or day == ARGS["steps"] - 1:
        print(day, "loss", round(float(loss), 4), flush=True)
