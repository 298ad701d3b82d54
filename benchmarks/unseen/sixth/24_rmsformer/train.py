import torch
from torch import nn
import torch.nn.functional as F
from torch.amp import autocast, GradScaler

torch.manual_seed(0)
N_F, D = 24, 64


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        ms = (x * x).mean(-1, keepdim=True)
        return x * torch.rsqrt(ms + self.eps) * self.g


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(D)
        self.w1, self.w3, self.w2 = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class TabNet(nn.Module):
    def __init__(self, n_out):
        super().__init__()
        self.inp = nn.Linear(N_F, D)
        self.blocks = nn.ModuleDict({f"b{i}": Block() for i in range(2)})
        self.norm = RMSNorm(D)
        self.head = nn.Linear(D, n_out)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks.values():
            x = b(x)
        return self.head(self.norm(x))


mu = torch.randn(6, N_F)


def sample(n):
    y = torch.randint(0, 6, (n,))
    x = mu[y] + 0.6 * torch.randn(n, N_F)
    x = x * 900.0
    return x.cuda(), y.cuda()


net = TabNet(6).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = GradScaler("cuda")
for it in range(300):
    x, y = sample(128)
    with autocast("cuda", dtype=torch.float16):
        out = net(x)
        loss = F.cross_entropy(out, y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    gn = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if it % 60 == 59:
        print(f"{it} ce {loss.item():.4f} acc {(out.argmax(1) == y).float().mean():.3f} gnorm {float(gn):.3f}")
