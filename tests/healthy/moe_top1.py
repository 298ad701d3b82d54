"""A mixture of experts, top-1 routing: experts without a token get no gradient that step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class MoE(nn.Module):
    def __init__(self, d=16, experts=8):
        super().__init__()
        self.router = nn.Linear(d, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d)) for _ in range(experts)
        )

    def forward(self, x):
        with torch.autocast(device, enabled=False):
            logits = self.router(x.float())
        p = logits.softmax(-1)
        gate, index = p.max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            chosen = index == e
            if chosen.any():
                out[chosen] = (gate[chosen, None] * expert(x[chosen])).to(out.dtype)
        share = F.one_hot(index, p.shape[-1]).float().mean(0)
        return (
            x + out,
            (share * p.mean(0)).sum() * p.shape[-1],
            logits.logsumexp(-1).square().mean(),
        )


moe, head = MoE().to(device), nn.Linear(16, 4).to(device)
optimizer = torch.optim.AdamW([*moe.parameters(), *head.parameters()], lr=3e-3)
scaler = torch.amp.GradScaler(device)
w = torch.randn(16, 4, device=device)

for step in range(50):
    x = torch.randn(16, 16, device=device)
    y = (x.abs() @ w).argmax(1)
    with torch.autocast(device, dtype=torch.float16):
        h, balance, z = moe(x)
        loss = F.cross_entropy(head(h), y) + 0.01 * balance + 1e-3 * z
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
