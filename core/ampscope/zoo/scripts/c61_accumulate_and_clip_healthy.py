"""Gradient accumulation over four micro-batches, with clipping."""

import torch
import torch.nn as nn
import torch.nn.functional as F

ACCUMULATION = 4


class PatchTransformer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.patch_embed = nn.Linear(8, dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        h = self.patch_embed(x)
        h = h + self.mlp(self.norm(h))
        return self.head(h.mean(dim=1))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = PatchTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler(device)

    optimizer.zero_grad()
    for i in range(160):
        x = torch.randn(16, 6, 8)
        y = x.mean(dim=1)[:, :3].argmax(dim=1)
        x, y = x.to(device), y.to(device)
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) / ACCUMULATION
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATION == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if (i + 1) % (10 * ACCUMULATION) == 0:
                print(f"update {(i + 1) // ACCUMULATION}: loss {loss.item() * ACCUMULATION:.4f}")


if __name__ == "__main__":
    main()
