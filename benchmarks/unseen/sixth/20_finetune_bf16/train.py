import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Res(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n = nn.LayerNorm(d)
        self.f = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.f(self.n(x))


class Clf(nn.Module):
    def __init__(self, d=64, k=12):
        super().__init__()
        self.stem = nn.Linear(20, d)
        self.res = nn.ModuleList(Res(d) for _ in range(3))
        self.fc = nn.Linear(d, k)

    def forward(self, x):
        x = self.stem(x)
        for r in self.res:
            x = checkpoint(r, x, use_reentrant=False)
        return self.fc(x)


def task(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(12, 20, generator=g)


def sample(c, n=64):
    y = torch.randint(0, 12, (n,))
    x = c[y] + 0.8 * torch.randn(n, 20)
    return x, y


model = Clf().to(device)
# quick pretraining on the source task
c0 = task(0)
o = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(80):
    x, y = sample(c0)
    l = F.cross_entropy(model(x.to(device)), y.to(device))
    o.zero_grad()
    l.backward()
    o.step()
print("pretrain loss", round(l.item(), 3))

# finetune, everything in bf16 to fit
model = model.to(dtype=torch.bfloat16)
c1 = task(1)
opt = torch.optim.AdamW(model.parameters(), lr=4e-5, weight_decay=0.01, betas=(0.9, 0.95))
steps, warm = 300, 20
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / warm))
run = None
for s in range(steps):
    x, y = sample(c1)
    logits = model(x.to(device, torch.bfloat16))
    loss = F.cross_entropy(logits.float(), y.to(device))
    opt.zero_grad()
    loss.backward()
    gn = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    run = loss.item() if run is None else 0.97 * run + 0.03 * loss.item()
    if s % 100 == 99:
        print(f"ft {s} loss {run:.4f} gnorm {float(gn):.2f}")
