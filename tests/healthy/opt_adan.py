"""Adan: Nesterov momentum from differences of gradients."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Adan(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2, b3 = group["betas"]
            for p in filter(lambda p: p.grad is not None, group["params"]):
                s = self.state[p]
                if not s:
                    s["k"], s["before"] = 0, p.grad.clone()
                    s["m"], s["n"], s["v"] = (torch.zeros_like(p) for _ in range(3))
                s["k"] += 1
                diff = p.grad - s["before"]
                s["m"].lerp_(p.grad, 1 - b1)
                s["v"].lerp_(diff, 1 - b2)
                n = p.grad + b2 * diff
                s["n"].mul_(b3).addcmul_(n, n, value=1 - b3)
                m = s["m"] / (1 - b1 ** s["k"])
                v = s["v"] / (1 - b2 ** s["k"])
                root = (s["n"] / (1 - b3 ** s["k"])).sqrt().add_(group["eps"])
                p.sub_(group["lr"] * (m + b2 * v) / root)
                s["before"] = p.grad.clone()


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = Adan(model.parameters(), lr=3e-3)
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
