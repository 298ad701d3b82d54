"""Classify sensor windows; each window is scaled to unit RMS inside the model."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class UnitRMS(nn.Module):
    """Scale every row to unit root mean square."""

    def __init__(self, eps=1e-4):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        rms = (x * x).mean(dim=1, keepdim=True).sqrt()
        return x / (rms + self.eps)


class WindowClassifier(nn.Module):
    def __init__(self, n_in=24, n_classes=4):
        super().__init__()
        self.scale_rows = UnitRMS()
        self.fc1 = nn.Linear(n_in, 64)
        self.fc2 = nn.Linear(64, n_classes)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.scale_rows(x))))


def sample_windows(generator):
    x = torch.randn(32, 24, generator=generator)
    x[-4:] = 0.0  # short batches are padded to 32 with blank windows
    return x, x[:, :4].argmax(dim=1)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(5)
    model = WindowClassifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler(device)

    for step in range(60):
        x, y = sample_windows(generator)
        # half the bytes over the bus: the windows travel as half precision
        x, y = x.to(device, dtype=torch.float16), y.to(device)
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 12 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
