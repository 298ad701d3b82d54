"""Cuisine of a recipe from the grams of each ingredient."""
import numpy as np
import paddle
import paddle.nn as nn

paddle.seed(9)
INGREDIENTS, CUISINES = 60, 5


class RootMeanSquare(nn.Layer):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.gain = self.create_parameter([width], default_initializer=nn.initializer.Constant(1.0))
        self.eps = eps

    def forward(self, h):
        power = (h * h).mean(axis=-1, keepdim=True)
        return h * paddle.rsqrt(power + self.eps) * self.gain


class Course(nn.Layer):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.proj = nn.Linear(n_in, n_out)
        self.scale = RootMeanSquare(n_out)
        self.act = nn.Silu()

    def forward(self, x):
        return self.act(self.scale(self.proj(x)))


class Kitchen(nn.Layer):
    def __init__(self):
        super().__init__()
        self.courses = nn.Sequential(Course(INGREDIENTS, 512), Course(512, 256))
        self.cuisine = nn.Linear(256, CUISINES)

    def forward(self, grams):
        return self.cuisine(self.courses(grams))


def recipes(n, seed):
    rng = np.random.default_rng(seed)
    taste = np.random.default_rng(77).dirichlet(np.full(INGREDIENTS, 0.25), CUISINES)
    y = rng.integers(0, CUISINES, n)
    portions = rng.integers(20, 60, (n, 1))
    share = np.stack([rng.dirichlet(taste[c] * 40 + 0.02) for c in y])
    return (share * portions * 450.0).astype("float32"), y.astype("int64")


x, y = recipes(2560, 1)
model = Kitchen()
schedule = paddle.optimizer.lr.CosineAnnealingDecay(5e-4, T_max=200)
opt = paddle.optimizer.AdamW(schedule, parameters=model.parameters(), weight_decay=0.01)
scaler = paddle.amp.GradScaler(init_loss_scaling=4096)
order = np.random.default_rng(3)
for it in range(200):
    pick = order.integers(0, len(x), 512)
    with paddle.amp.auto_cast(level="O1", dtype="float16"):
        out = model(paddle.to_tensor(x[pick]))
        loss = nn.functional.cross_entropy(out, paddle.to_tensor(y[pick]))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.clear_grad()
    schedule.step()
    if it % 20 == 0 or it == 199:
        acc = float((out.argmax(-1).numpy() == y[pick]).mean())
        print(f"it {it} loss {float(loss):.4f} acc {acc:.2f}", flush=True)
