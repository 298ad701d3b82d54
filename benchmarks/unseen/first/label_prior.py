"""Multi-label tagging; the output bias starts at the log odds of each label."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

LABELS = 20


def dataset(n=640):
    g = torch.Generator().manual_seed(50)
    rule = torch.randn(18, LABELS, generator=g)
    offset = torch.linspace(0, 24, LABELS)
    x = torch.randn(n, 18, generator=g)
    return x, ((x @ rule - offset) > 0).float()


class Tagger(nn.Module):
    def __init__(self, frequency):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(18, 64), nn.ReLU(), nn.LayerNorm(64))
        self.tags = nn.Linear(64, LABELS)
        nn.init.normal_(self.tags.weight, std=0.01)
        with torch.no_grad():
            self.tags.bias.copy_(torch.log(frequency / (1 - frequency)))

    def forward(self, x):
        return self.tags(self.trunk(x))


def main():
    torch.manual_seed(51)
    x, y = dataset()
    model = Tagger(y.mean(0))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(3):
        total = 0.0
        for xb, yb in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.binary_cross_entropy_with_logits(model(xb), yb)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f} scale {scaler.get_scale():g}")


main()
