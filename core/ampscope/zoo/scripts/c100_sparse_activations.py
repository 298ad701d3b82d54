"""Classifier with two expert branches; the gates of one are shut, and half its units are silent."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class TwoExperts(nn.Module):
    def __init__(self, n_in=16, hidden=64, n_classes=4):
        super().__init__()
        self.main = nn.Linear(n_in, hidden)
        self.rare = nn.Linear(n_in, hidden)
        self.head = nn.Linear(2 * hidden, n_classes)
        # the rare expert only answers inputs far outside the usual range
        nn.init.constant_(self.rare.bias, -50.0)

    def forward(self, x):
        h = torch.cat([F.relu(self.main(x)), F.relu(self.rare(x))], dim=1)
        return self.head(h)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TwoExperts().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    for step in range(60):
        x = torch.randn(64, 16)
        y = x[:, :4].argmax(dim=1)
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            zeros = (model.rare.weight.grad == 0).float().mean()
            print(f"step {step} loss {loss.item():.4f} zero gradients in rare expert {zeros:.0%}")


if __name__ == "__main__":
    main()
