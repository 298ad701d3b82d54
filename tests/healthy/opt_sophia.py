"""Sophia-G: a clipped step over a sampled Gauss-Newton diagonal, refreshed every ten steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class SophiaG(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.965, 0.99), rho=0.04):
        super().__init__(params, dict(lr=lr, betas=betas, rho=rho))

    @torch.no_grad()
    def update_hessian(self, batch):
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                h = self.state[p].setdefault("hessian", torch.zeros_like(p))
                h.mul_(group["betas"][1]).addcmul_(
                    p.grad, p.grad, value=(1 - group["betas"][1]) * batch
                )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                h = state.setdefault("hessian", torch.zeros_like(p))
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                m.mul_(group["betas"][0]).add_(p.grad, alpha=1 - group["betas"][0])
                ratio = (m.abs() / (group["rho"] * h + 1e-15)).clamp(max=1)
                p.addcmul_(m.sign(), ratio, value=-group["lr"])


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = SophiaG(model.parameters(), lr=2e-3)
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
    if step % 10 == 9:  # labels drawn from the model itself; these gradients make no step
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            logits = model(x[idx])
        drawn = torch.distributions.Categorical(logits=logits.detach().float()).sample()
        F.cross_entropy(logits.float(), drawn).backward()
        optimizer.update_hessian(batch=64)
        optimizer.zero_grad()
    if step % 10 == 0:
        print(step, loss.item())
