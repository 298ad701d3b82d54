import torch
from torch import nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
C, L = 6, 256


def clips(n):
    y = torch.randint(0, C, (n,))
    t = torch.arange(L) / L
    x = torch.sin(6.283 * (4 + 5 * y[:, None]) * t + 6.283 * torch.rand(n, 1)) + 0.8 * torch.randn(n, L)
    return x[:, None], y


X, Y = clips(5760)
X[117, 0, 40:43] = torch.tensor([2.1e5, -3.0e5, 1.4e5])
Xv, Yv = clips(256)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.feat = nn.Sequential(
            nn.Conv1d(1, 16, 9, 4, 4), nn.BatchNorm1d(16), nn.ReLU(),
            nn.Conv1d(16, 32, 5, 4, 2), nn.BatchNorm1d(32), nn.ReLU())
        self.fc = nn.Linear(32 * 16, C)

    def forward(self, x):
        return self.fc(self.feat(x).flatten(1))


def evaluate(net):
    net.eval()
    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
        o = net(Xv.to(device))
        l = F.cross_entropy(o, Yv.to(device))
    net.train()
    return l.item(), (o.argmax(1).cpu() == Yv).float().mean().item()


net = Net().to(device)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler(device)
run = None
bs = 32
for it in range(len(X) // bs):
    j = slice(it * bs, (it + 1) * bs)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(net(X[j].to(device)), Y[j].to(device))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if loss.isfinite():
        run = loss.item() if run is None else 0.95 * run + 0.05 * loss.item()
    if it % 30 == 29:
        vl, va = evaluate(net)
        print(f"it {it} train {run:.4f} val {vl:.4f} acc {va:.3f} scale {scaler.get_scale():.0f}")
