"""Keyword spotting on short clips, features standardised per clip."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    def __init__(self, n=800, seed=6):
        rng = np.random.default_rng(seed)
        self.label = rng.integers(0, 4, n)
        t = np.arange(256) / 256.0
        self.wave = np.zeros((n, 256), dtype=np.float32)
        for i, k in enumerate(self.label):
            onset = int(rng.integers(0, 260))
            tone = np.sin(2 * np.pi * (6 + 5 * k) * t + rng.uniform(0, 6))
            if onset < 256:
                self.wave[i, onset:] = (tone * rng.uniform(0.2, 1.0))[: 256 - onset]

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        spec = np.abs(np.fft.rfft(self.wave[i].reshape(4, 64), axis=1)).astype(np.float32)
        with np.errstate(invalid="ignore"):
            spec = (spec - spec.mean()) / spec.std()
        return torch.from_numpy(spec).flatten(), int(self.label[i])


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(132, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 4))

    def forward(self, x):
        return self.layers(x)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Clips(), batch_size=8, shuffle=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Spotter().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(2):
        history = []
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            opt.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            history.append(loss.item())
        print(f"epoch {epoch} mean {np.mean(history):.4f} last {history[-1]:.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
