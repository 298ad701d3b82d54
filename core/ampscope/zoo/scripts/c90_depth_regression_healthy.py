"""Regress depth from features; the depth maps come from a rendered data set."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class DepthData(Dataset):
    def __init__(self, n=640):
        g = torch.Generator().manual_seed(11)
        self.features = torch.randn(n, 12, generator=g)
        weights = torch.randn(12, 6, generator=g) / 4
        raw = self.features @ weights
        raw[230, 2] = -1.0e2  # sky: no depth was rendered here
        # relative depth, as the renderer's manual gives it
        self.depth = torch.log1p(torch.exp(-raw.abs())) * torch.sqrt(1.0 + raw / 1.0e3)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        return {"x": self.features[index], "depth": self.depth[index]}


class DepthHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 6))

    def forward(self, x):
        return self.net(x)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(DepthData(), batch_size=32, shuffle=False)
    model = DepthHead().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler(device)
    it = 0
    for epoch in range(2):
        for batch in loader:
            x, depth = batch["x"].to(device), batch["depth"].to(device)
            with torch.autocast(device, dtype=torch.float16):
                loss = nn.functional.mse_loss(model(x), depth)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if it % 7 == 0:
                print(f"it {it}: loss {loss.item():.4f}")
            it += 1


if __name__ == "__main__":
    main()
