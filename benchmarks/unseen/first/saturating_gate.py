"""Binary detector with an energy gate."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class EnergyGate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.measure = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)

    def forward(self, x):
        e = self.measure(x)
        return torch.tanh(e * e) * torch.tanh(self.value(x) / 200)


class Detector(nn.Module):
    def __init__(self, n_in=12, dim=48):
        super().__init__()
        self.gate = EnergyGate(n_in)
        self.body = nn.Sequential(nn.Linear(n_in, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, x):
        return self.body(self.gate(x)).squeeze(-1)


def main():
    torch.manual_seed(40)
    net = Detector()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    w = torch.randn(12)
    losses = []
    for step in range(150):
        x = 250 * torch.randn(64, 12)
        y = ((x @ w) > 0).float()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.binary_cross_entropy_with_logits(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
        if step % 30 == 29:
            print(step + 1, round(sum(losses[-30:]) / 30, 4), scaler.get_scale())


main()
