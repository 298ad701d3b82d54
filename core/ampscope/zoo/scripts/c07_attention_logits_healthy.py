"""Single-head attention over image patches, trained on a toy detection-style target."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.scale = dim**-0.5

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        return self.proj(attn @ v)


class PatchNet(nn.Module):
    def __init__(self, dim=128, n_out=4):
        super().__init__()
        self.attn = Attention(dim)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, n_out))

    def forward(self, patches):
        return self.head(patches + self.attn(patches)).mean(dim=1)


def make_batch(generator, device):
    patches = torch.randn(16, 12, 128, generator=generator) * 6
    target = patches.mean(dim=1)[:, :4]
    return patches.to(device), target.to(device)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(7)
    model = PatchNet().to(device)
    # query and key projections sharpen over a long pretraining
    with torch.no_grad():
        model.attn.q.weight *= 16
        model.attn.k.weight *= 16

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler(device)
    for step in range(1, 51):
        patches, target = make_batch(generator, device)
        with torch.autocast(device, dtype=torch.float16):
            prediction = model(patches)
            loss = F.mse_loss(prediction, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"[{step:3d}] loss={loss.item():.4f}")


if __name__ == "__main__":
    main()
