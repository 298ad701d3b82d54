"""Sharpness-aware minimisation under AMP: two scaled backward passes, unscaled before each use."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.norm(
            torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]])
        )
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=float(group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()


model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)


def scaled_gradients(xb, yb):
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(xb), yb)
    scaler.scale(loss).backward()
    inverse = 1.0 / scaler.get_scale()
    for p in model.parameters():
        p.grad.mul_(inverse)
    return loss, all(torch.isfinite(p.grad).all() for p in model.parameters())


for step in range(50):
    idx = torch.randint(0, 400, (50,), device=device)
    loss, finite = scaled_gradients(x[idx], y[idx])
    if not finite:
        optimizer.zero_grad()
        scaler.update(scaler.get_scale() / 2)
        continue
    optimizer.first_step()
    scaled_gradients(x[idx], y[idx])
    optimizer.second_step()
    if step % 10 == 0:
        print(step, loss.item())
