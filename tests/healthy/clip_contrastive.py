"""Contrastive pairs with a learnt temperature: logits of up to 100, log-softmax in fp32."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 32))
        self.b = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 32))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a, b):
        a, b = F.normalize(self.a(a).float(), dim=-1), F.normalize(self.b(b).float(), dim=-1)
        return self.logit_scale.exp() * a @ b.t()


model = Pair().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler(device)
basis = torch.randn(2, 6, 24, device=device)

for step in range(50):
    z = torch.randn(64, 6, device=device)
    with torch.autocast(device, dtype=torch.float16):
        logits = model(z @ basis[0], z @ basis[1]).float()
    label = torch.arange(64, device=device)
    loss = (F.cross_entropy(logits, label) + F.cross_entropy(logits.t(), label)) / 2
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    if step % 10 == 0:
        print(step, loss.item(), model.logit_scale.exp().item())
