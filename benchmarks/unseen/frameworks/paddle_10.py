import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(27)
rng = np.random.default_rng(27)

V, L = 80, 16
seqs = np.zeros((600, L + 1), dtype="int64")
seqs[:, 0] = rng.integers(0, V, 600)
for t in range(L):
    jump = rng.random(600) < 0.1
    seqs[:, t + 1] = np.where(jump, rng.integers(0, V, 600), (seqs[:, t] * 3 + 7) % V)


class NextToken(nn.Layer):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, 48)
        self.mix = nn.Sequential(nn.Linear(48, 128), nn.Tanh(), nn.Linear(128, 48))
        self.proj = nn.Linear(48, V)

    def forward(self, t):
        e = self.table(t)
        return self.proj(e + self.mix(e))


model = NextToken()
sched = paddle.optimizer.lr.CosineAnnealingDecay(0.02, T_max=70)
opt = paddle.optimizer.AdamW(sched, parameters=model.parameters(), weight_decay=0.01,
                             grad_clip=nn.ClipGradByGlobalNorm(10.0))
scaler = paddle.amp.GradScaler(init_loss_scaling=4096.0)

for step in range(70):
    b = rng.integers(0, 600, 64)
    src, dst = paddle.to_tensor(seqs[b, :-1]), paddle.to_tensor(seqs[b, 1:])
    with paddle.amp.auto_cast(level="O1", dtype="float16"):
        loss = F.cross_entropy(model(src).reshape([-1, V]), dst.reshape([-1]), reduction="sum")
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    opt.clear_grad()
    sched.step()
    if step % 7 == 0 or step == 69:
        print("step", step, "summed nll", float(loss))
