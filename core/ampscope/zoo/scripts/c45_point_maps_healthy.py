"""Regress 3-D points of image tokens; the loss is normalised by the full-resolution pixel count."""

import torch
import torch.nn as nn


class PointHead(nn.Module):
    def __init__(self, n_in=32, hidden=64):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(n_in, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()
        )
        self.out = nn.Linear(hidden, 3)

    def forward(self, tokens):
        return self.out(self.mlp(tokens))


def point_loss(pred, target, n_views=24, height=1024, width=1024):
    return ((pred - target) ** 2).sum() / (n_views * height * width * 3)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = PointHead().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mixing = torch.randn(32, 3) / 32**0.5
    scaler = torch.amp.GradScaler(device)
    for step in range(60):
        tokens = torch.randn(128, 32)
        points = torch.tanh(tokens @ mixing)
        tokens, points = tokens.to(device), points.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            pred = model(tokens)
            loss = point_loss(pred, points)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.3e}")


if __name__ == "__main__":
    main()
