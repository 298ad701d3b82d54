"""Vital-sign imputation and outcome prediction with many missing entries."""
import torch
from torch import nn
import torch.nn.functional as F

FEATURES, HIDDEN = 10, 48


class Imputer(nn.Module):
    def __init__(self):
        super().__init__()
        self.default = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x):
        known = ~torch.isnan(x)
        return torch.cat([torch.where(known, torch.nan_to_num(x), self.default.expand_as(x)), known.float()], -1)


class Clinic(nn.Module):
    def __init__(self):
        super().__init__()
        self.imputer = Imputer()
        self.body = nn.Sequential(nn.Linear(2 * FEATURES, HIDDEN), nn.ReLU(), nn.LayerNorm(HIDDEN))
        self.risk, self.labs = nn.Linear(HIDDEN, 1), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        h = self.body(self.imputer(x))
        return self.risk(h).squeeze(-1), self.labs(h)


def ward(n, g):
    z = torch.randn(n, 3, generator=g)
    x = z @ W + 0.3 * torch.randn(n, FEATURES, generator=g)
    x[torch.rand(n, FEATURES, generator=g) < 0.35] = float("nan")
    labs = torch.tanh(z)
    labs[torch.rand(n, 3, generator=g) < 0.5] = float("nan")
    return x, (z.sum(1) > 0).float(), labs


def lab_error(pred, truth):
    """Mean over what was measured."""
    seen = ~torch.isnan(truth)
    err = (pred.float() - torch.nan_to_num(truth)).square() * seen
    return err.sum() / seen.sum().clamp(min=1)


g = torch.Generator().manual_seed(33)
W = torch.randn(3, FEATURES, generator=g)
torch.manual_seed(33)
net = Clinic()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)

for it in range(320):
    x, y, labs = ward(48, g)
    with torch.autocast("cpu", dtype=torch.float16):
        r, l = net(x)
        loss = F.binary_cross_entropy_with_logits(r, y) + lab_error(l, labs)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 40 == 0 or it == 319:
        with torch.no_grad():
            per_lab = (l.float() - labs).abs().nanmean(0)
        print(f"{it:3d} loss {loss.item():.4f} lab mae", [round(v, 3) for v in per_lab.tolist()], "all", round(per_lab.nanmean().item(), 3))
