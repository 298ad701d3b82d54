"""Adam whose moments are kept as 8-bit integers with a scale a row, as 8-bit optimizers do."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Adam8(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-6):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @staticmethod
    def pack(t):
        scale = t.abs().amax().clamp(min=1e-20) / 127
        return (t / scale).round().to(torch.int8), scale

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in filter(lambda p: p.grad is not None, group["params"]):
                s = self.state[p]
                if not s:
                    s["k"], s["m"], s["v"] = (
                        0,
                        self.pack(torch.zeros_like(p)),
                        self.pack(torch.zeros_like(p)),
                    )
                s["k"] += 1
                m = s["m"][0].float() * s["m"][1] * b1 + p.grad * (1 - b1)
                root = s["v"][0].float() * s["v"][1]
                v = root.square() * b2 + p.grad.square() * (1 - b2)
                s["m"], s["v"] = self.pack(m), self.pack(v.sqrt())
                floor = s["v"][1] / 2
                update = (
                    m
                    / (1 - b1 ** s["k"])
                    / ((v / (1 - b2 ** s["k"])).sqrt().clamp(min=floor) + group["eps"])
                )
                p.add_(update, alpha=-group["lr"])


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = Adam8(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(50):
    idx = torch.randint(0, 400, (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
