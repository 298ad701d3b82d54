"""Classify raw sensor windows (ADC counts) with a small RMS-normalised network."""

import torch
import torch.nn as nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, h):
        variance = (h * h).mean(-1, keepdim=True)
        return self.weight * (h * torch.rsqrt(variance + self.eps))


class SensorNet(nn.Module):
    def __init__(self, n_in=16, dim=64, n_classes=4):
        super().__init__()
        self.proj = nn.Linear(n_in, dim)
        self.norm = RMSNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, n_classes))

    def forward(self, x):
        return self.mlp(self.norm(self.proj(x)))


class Trainer:
    def __init__(self, model, device, lr=2e-3):
        self.model = model.to(device)
        self.device = device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler(device)
        self.criterion = nn.CrossEntropyLoss()

    def train_step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.float16):
            loss = self.criterion(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = Trainer(SensorNet(), device)
    for step in range(60):
        x = torch.randn(64, 16)
        y = x[:, :4].argmax(dim=1)
        counts = x * 2000.0  # the converter delivers counts, not volts
        loss = trainer.train_step(counts.to(device), y.to(device))
        if step % 15 == 0:
            print(f"step {step}: {loss:.4f}")


if __name__ == "__main__":
    main()
