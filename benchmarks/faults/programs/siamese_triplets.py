"""Metric learning with triplets and margin; batch-hard mining."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Embedder(nn.Module):
    def __init__(self, n_in=12, dim=16):
        super().__init__()
        self.block1 = nn.Linear(n_in, 40)
        self.bn1 = nn.BatchNorm1d(40)
        self.block2 = nn.Linear(40, dim)

    def forward(self, x):
        h = F.relu(self.bn1(self.block1(x)))
        h = self.block2(h)
        return h / torch.sqrt(h.float().pow(2).sum(dim=-1, keepdim=True) + 1e-4)


def people(n, gen):
    who = torch.randint(6, (n,), generator=gen)
    return FACES[who] + 0.9 * torch.randn(n, 12, generator=gen), who


def triplet_loss(z, who, margin=0.4):
    gap = z.unsqueeze(1) - z.unsqueeze(0)
    dist = torch.sqrt(gap.float().pow(2).sum(-1) + 1e-3)
    same = who[:, None] == who[None, :]
    positive = dist.masked_fill(~same, 0.0).max(dim=1).values
    negative = dist.masked_fill(same, 1e3).min(dim=1).values
    hinge = F.relu(positive - negative + margin)
    active = (hinge > 0).sum()
    return hinge.sum() / active.clamp(min=1)


torch.set_num_threads(1)
gen = torch.Generator().manual_seed(141)
FACES = torch.randn(6, 12, generator=gen)
torch.manual_seed(141)
embedder = Embedder()
optimizer = torch.optim.Adam(embedder.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
for step in range(60):
    x, who = people(36, gen)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        z = embedder(x)
        loss = triplet_loss(z, who)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 15 == 0:
        print("step", step, "loss", round(loss.item(), 4))
embedder.eval()
total = 0.0
with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
    for _ in range(8):
        x, who = people(36, gen)
        total += triplet_loss(embedder(x), who).item() / 8
print("test loss", round(total, 4))
