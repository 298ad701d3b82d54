"""Lookahead around SGD: every five steps the weights go half the way back to the slow ones."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Lookahead:
    def __init__(self, base, k=5, alpha=0.5):
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    @torch.no_grad()
    def after_step(self):
        self.count += 1
        if self.count % self.k == 0:
            for g, slow in zip(self.base.param_groups, self.slow):
                for p, s in zip(g["params"], slow):
                    s.lerp_(p, self.alpha)
                    p.copy_(s)


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
lookahead = Lookahead(optimizer)
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
    lookahead.after_step()
    if step % 10 == 0:
        print(step, loss.item())
