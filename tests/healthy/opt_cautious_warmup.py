"""A cautious AdamW (steps against the gradient are masked) with a long warm-up of the rate."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class CautiousAdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        before = [
            (p, p.clone()) for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        super().step(closure)
        for p, old in before:
            update = p - old
            mask = (update * p.grad < 0).to(p.dtype)
            p.copy_(old + update * mask / mask.mean().clamp(min=1e-3))


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = CautiousAdamW(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 30))
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
    schedule.step()
    if step % 10 == 0:
        print(step, loss.item())
