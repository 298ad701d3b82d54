"""Prodigy: the step size is estimated from the gradients and grows from 1e-6."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Prodigy(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, betas=(0.9, 0.99), d0=1e-6):
        super().__init__(params, dict(lr=lr, betas=betas, d=d0, d0=d0, numerator=0.0, k=0))

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        (b1, b2), d = group["betas"], group["d"]
        group["k"] += 1
        b3 = b2**0.5
        change, denominator = 0.0, 0.0
        for p in filter(lambda p: p.grad is not None, group["params"]):
            s = self.state[p]
            if not s:
                s["start"], s["s"] = p.clone(), torch.zeros_like(p)
                s["m"], s["v"] = torch.zeros_like(p), torch.zeros_like(p)
            change += (d / group["d0"]) * d * (p.grad * (s["start"] - p)).sum().item()
            s["m"].mul_(b1).add_(p.grad, alpha=d * (1 - b1))
            s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=d * d * (1 - b2))
            s["s"].mul_(b3).add_(
                p.grad, alpha=(d / group["d0"]) * d * (1 - b3) / (1 - b3) * (1 - b3)
            )
            denominator += s["s"].abs().sum().item()
        group["numerator"] = b3 * group["numerator"] + (1 - b3) * change
        if denominator > 0:
            group["d"] = max(
                d, min(group["numerator"] / denominator, 2 * d if group["k"] > 1 else d)
            )
        if group["k"] < 14:
            group["d"] = max(group["d"], 2 * d)
        correction = (1 - b2 ** group["k"]) ** 0.5 / (1 - b1 ** group["k"])
        for p in filter(lambda p: p.grad is not None, group["params"]):
            s = self.state[p]
            p.addcdiv_(s["m"], s["v"].sqrt().add_(d * 1e-8), value=-group["lr"] * d * correction)


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = Prodigy(model.parameters())
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(60):
    idx = torch.randint(0, 400, (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
