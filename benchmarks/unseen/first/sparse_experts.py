"""Top-1 mixture of experts over a large, mostly unused vocabulary."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class SwitchLayer(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x):
        prob = torch.softmax(self.router(x).float(), dim=-1)
        gate, index = prob.max(dim=-1)
        out = torch.zeros_like(x, dtype=torch.float32)
        for i, expert in enumerate(self.experts):
            rows = (index == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, gate[rows, None] * expert(x[rows]).float())
        return x + out


class Model(nn.Module):
    def __init__(self, vocab=5000, dim=32, experts=8, classes=10):
        super().__init__()
        self.table = nn.Embedding(vocab, dim)
        self.switch = SwitchLayer(dim, experts)
        self.unused = nn.Linear(dim, dim)
        self.head = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, ids, use_extra=False):
        x = self.switch(self.table(ids).mean(1))
        if use_extra:
            x = self.unused(x)
        return self.head(x)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--bias", type=float, default=-0.6)
    a = p.parse_args()
    torch.manual_seed(16)
    model = Model()
    nn.init.constant_(model.head[0].bias, a.bias)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(a.steps):
        y = torch.randint(10, (48,))
        ids = y[:, None] * 20 + torch.randint(20, (48, 4))
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(ids), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 30 == 29:
            g = model.table.weight.grad
            print(f"{step + 1} loss {loss.item():.4f} zero embedding grads {(g == 0).float().mean():.3f}")


main()
