"""Metric learning: pull items of one class together, push the classes apart."""

import torch
import torch.nn as nn


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x):
        return self.layers(x)


class PairLoss(nn.Module):
    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def forward(self, z, labels):
        diff = z[:, None, :] - z[None, :, :]
        dist = torch.sqrt((diff * diff).sum(dim=-1))
        same = labels[:, None] == labels[None, :]
        pull = dist**2
        push = torch.relu(self.margin - dist) ** 2
        return torch.where(same, pull, push).mean()


def main(steps=60):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    centres = torch.randn(4, 10)
    model, pair_loss = Embedder().to(device), PairLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    for step in range(steps):
        labels = torch.randint(0, 4, (24,))
        x = centres[labels] + 0.5 * torch.randn(24, 10)
        x, labels = x.to(device), labels.to(device)
        with torch.autocast(device, dtype=torch.float16):
            z = model(x)
            loss = pair_loss(z, labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step}: pair loss {loss.item():.4f}, scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
