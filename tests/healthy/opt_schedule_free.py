"""Schedule-free SGD: the weights hold an interpolation, the average is read for evaluation."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta, k=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            c = 1 / group["k"]
            for p in filter(lambda p: p.grad is not None, group["params"]):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, c).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = ScheduleFreeSGD(model.parameters(), lr=0.5)
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

optimizer.eval()
with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
    print("accuracy", (model(x).argmax(1) == y).float().mean().item())
