import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(14)
rng = np.random.RandomState(14)

x = rng.normal(size=(1200, 20)).astype("float32")
label = ((x[:, 0] * x[:, 1] > 0).astype("int64") + 2 * (x[:, 2] > 0).astype("int64"))


class Res(nn.Layer):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.a = nn.Linear(d, 2 * d)
        self.b = nn.Linear(2 * d, d)

    def forward(self, h):
        return h + self.b(F.gelu(self.a(self.norm(h))))


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(20, 48)
        self.blocks = nn.LayerList([Res(48) for _ in range(2)])
        self.cls = nn.Linear(48, 4)

    def forward(self, t):
        t = self.inp(t)
        for blk in self.blocks:
            t = blk(t)
        return self.cls(t)


net = Net()
opt = paddle.optimizer.AdamW(learning_rate=4e-3, parameters=net.parameters(), weight_decay=0.01)
net, opt = paddle.amp.decorate(net, opt, level="O2", dtype="float16")
scaler = paddle.amp.GradScaler(init_loss_scaling=2.0 ** 24, incr_every_n_steps=500)
ACC = 2

for step in range(60):
    total = 0.0
    for _ in range(ACC):
        r = rng.randint(0, 1200, 64)
        with paddle.amp.auto_cast(level="O2", dtype="float16"):
            logits = net(paddle.to_tensor(x[r]))
        loss = F.cross_entropy(logits.astype("float32"), paddle.to_tensor(label[r])) / ACC
        scaler.scale(loss).backward()
        total += float(loss)
    scaler.step(opt)
    scaler.update()
    opt.clear_grad()
    if step % 5 == 0 or step == 59:
        print(f"step {step:2d} loss {total:.4f}")
