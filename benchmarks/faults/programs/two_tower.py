"""Contrastive two-tower retrieval with a learnt temperature, by hand-kept fp32 master of the scale."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class Tower(nn.Module):
    def __init__(self, n_in, dim=24):
        super().__init__()
        self.fc1 = nn.Linear(n_in, 48)
        self.ln = nn.LayerNorm(48)
        self.fc2 = nn.Linear(48, dim)

    def forward(self, feats):
        h = F.gelu(self.ln(self.fc1(feats)))
        z = self.fc2(h)
        return z / (z.norm(dim=-1, keepdim=True) + 1e-3)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = Tower(10)
        self.item = Tower(14)
        self.log_temp = nn.Parameter(torch.zeros(()) + 1.5)

    def forward(self, q, d):
        zq = self.query(q)
        zd = self.item(d)
        return (zq @ zd.t()) * self.log_temp.exp()


def pairs(n, g, mix=None):
    latent = torch.randn(n, 6, generator=g)
    q = torch.tanh(latent @ MIX_Q) + 0.05 * torch.randn(n, 10, generator=g)
    d = torch.tanh(latent @ MIX_D) + 0.05 * torch.randn(n, 14, generator=g)
    return q, d


def info_nce(logits):
    target = torch.arange(len(logits))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


g = torch.Generator().manual_seed(21)
MIX_Q = torch.randn(6, 10, generator=g)
MIX_D = torch.randn(6, 14, generator=g)
torch.manual_seed(21)
model = TwoTower()
decay = [p for p in model.parameters() if p.dim() > 1]
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu")
max_norm = 5.0

for epoch in range(4):
    for i in range(15):
        q, d = pairs(32, g)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(q, d)
            loss = info_nce(logits.float())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        if i == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} temp {model.log_temp.exp().item():.2f}")

with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
    q, d = pairs(32, g)
    val = info_nce(model(q, d).float())
print(f"recall set loss {val.item():.4f}")
