import torch
import torch.nn as nn
import torch.nn.functional as F


class EventNet(nn.Module):
    def __init__(self, ch=12, classes=3):
        super().__init__()
        self.conv1 = nn.Conv1d(1, ch, 7, padding=3)
        self.bn1 = nn.BatchNorm1d(ch)
        self.conv2 = nn.Conv1d(ch, ch, 7, padding=3)
        self.bn2 = nn.BatchNorm1d(ch)
        self.fc = nn.Linear(ch, classes)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        return self.fc(h.mean(-1))


def traces(n, g, length=128):
    """Digitiser counts with 12 bits."""
    y = torch.randint(3, (n,), generator=g)
    t = torch.arange(length).float()
    f = torch.tensor([0.15, 0.5, 1.1])[y].unsqueeze(1)
    x = torch.sin(f * t + 6.28 * torch.rand(n, 1, generator=g)) + 0.4 * torch.randn(n, length, generator=g)
    return (900 * x).clamp(-2047, 2047).round().unsqueeze(1), y


def evaluate(net, g):
    net.eval()
    with torch.no_grad():
        x, y = traces(256, g)
        out = net(x.half()).float()
    net.train()
    return F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()


def main(steps=150):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(2)
    net = EventNet().half()
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for s in range(steps):
        x, y = traces(32, g)
        loss = F.cross_entropy(net(x.half()).float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 25 == 24:
            val, acc = evaluate(net, g)
            print(f"step {s + 1} train {loss.item():.4f} val {val:.4f} acc {acc:.3f}")


if __name__ == "__main__":
    main()
