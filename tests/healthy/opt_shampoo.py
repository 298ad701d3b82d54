"""A small Shampoo: inverse fourth roots by eigh in fp64, recomputed every five steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, eps=1e-4, every=5):
        super().__init__(params, dict(lr=lr, eps=eps, every=every))

    @staticmethod
    def root(matrix, eps):
        values, vectors = torch.linalg.eigh(
            matrix.double() + eps * torch.eye(len(matrix), device=matrix.device)
        )
        return (vectors * values.clamp(min=eps).pow(-0.25) @ vectors.T).to(matrix.dtype)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                g = p.grad if p.dim() == 2 else p.grad[:, None]
                s = self.state[p]
                if not s:
                    s["k"] = 0
                    s["left"] = torch.zeros(g.shape[0], g.shape[0], device=g.device)
                    s["right"] = torch.zeros(g.shape[1], g.shape[1], device=g.device)
                s["left"] += g @ g.T
                s["right"] += g.T @ g
                if s["k"] % group["every"] == 0:
                    s["l"], s["r"] = (
                        self.root(s["left"], group["eps"]),
                        self.root(s["right"], group["eps"]),
                    )
                s["k"] += 1
                p.sub_((s["l"] @ g @ s["r"]).view_as(p), alpha=group["lr"])


model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
).to(device)
optimizer = Shampoo(model.parameters())
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(40):
    idx = torch.randint(0, 400, (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
