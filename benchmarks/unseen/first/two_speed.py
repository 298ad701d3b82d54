"""Backbone and head trained with separate optimizers and learning rates."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(30, 80), nn.ReLU(), nn.Linear(80, 40), nn.ReLU())
        self.head = nn.Linear(40, 3)

    def forward(self, x):
        return self.head(self.backbone(x))


def fit(steps=100, device="cpu"):
    torch.manual_seed(23)
    model = Model().to(device)
    opt_backbone = torch.optim.AdamW(model.backbone.parameters(), lr=5e-4)
    opt_head = torch.optim.SGD(model.head.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler(device, init_scale=2.0 ** 13)
    mixing = torch.randn(30, 3, device=device) / 30 ** 0.5
    for step in range(steps):
        x = torch.randn(64, 30, device=device)
        y = x @ mixing
        opt_backbone.zero_grad()
        opt_head.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt_backbone)
        opt_head.step()
        scaler.update()
        if step % 20 == 0:
            print(f"{step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")


fit()
