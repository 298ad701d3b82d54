"""Mixture of experts on piecewise functions: top-1 router, load-balancing loss."""
import torch, torch.nn as nn, torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.w_in = nn.Linear(d, h)
        self.w_out = nn.Linear(h, d)

    def forward(self, x):
        h = F.silu(self.w_in(x))
        return self.w_out(h)


class MoELayer(nn.Module):
    def __init__(self, d, h, n):
        super().__init__()
        self.router = nn.Linear(d, n)
        self.experts = nn.ModuleList(Expert(d, h) for _ in range(n))

    def forward(self, x):
        gate = torch.softmax(self.router(x).float(), dim=-1)
        weight, index = gate.max(dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (index == e).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, (expert(x[rows]) * weight[rows].unsqueeze(-1)).to(out.dtype))
        used = F.one_hot(index, gate.shape[-1]).float().mean(0)
        self.balance = gate.shape[-1] * (used * gate.mean(0)).sum()
        return x + out


class Net(nn.Module):
    def __init__(self, d=24, n=4):
        super().__init__()
        self.stem = nn.Linear(6, d)
        self.norm = nn.LayerNorm(d)
        self.moe = MoELayer(d, 32, n)
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        h = self.norm(self.stem(x))
        h = self.moe(h)
        return self.head(h).squeeze(-1)


def sample(n, g):
    x = torch.randn(n, 6, generator=g)
    y = torch.where(x[:, 0] > 0, x[:, 1] - x[:, 2], torch.sin(2 * x[:, 3]))
    return x, y


def objective(net, x, y):
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(x)
    task = F.mse_loss(pred.float(), y)
    return task + 0.01 * net.moe.balance


torch.set_num_threads(1)
torch.manual_seed(13)
g = torch.Generator().manual_seed(13)
net = Net()
optimiser = torch.optim.RMSprop(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(70):
    x, y = sample(48, g)
    loss = objective(net, x, y)
    optimiser.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimiser)
    scaler.update()
    if step % 23 == 0:
        print("step", step, "loss:", f"{loss.item():.4f}")
x, y = sample(256, g)
with torch.no_grad():
    print("eval loss:", f"{objective(net, x, y).item():.4f}")
