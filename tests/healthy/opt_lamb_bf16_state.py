"""LAMB with its moments kept in bf16: a trust ratio a layer, stable all the same."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in filter(lambda p: p.grad is not None, group["params"]):
                s = self.state[p]
                if not s:
                    s["k"] = 0
                    s["exp_avg"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    s["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.bfloat16)
                s["k"] += 1
                m = s["exp_avg"].float().mul_(b1).add_(p.grad, alpha=1 - b1)
                v = s["exp_avg_sq"].float().mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                s["exp_avg"].copy_(m)
                s["exp_avg_sq"].copy_(v)
                update = (m / (1 - b1 ** s["k"])) / ((v / (1 - b2 ** s["k"])).sqrt() + group["eps"])
                update.add_(p, alpha=group["weight_decay"])
                w, u = p.norm(), update.norm()
                trust = (w / u).item() if w > 0 and u > 0 else 1.0
                p.add_(update, alpha=-group["lr"] * trust)


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = Lamb(model.parameters(), lr=3e-2)
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
