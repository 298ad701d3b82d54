"""Quantisation-aware training: weights and activations go through fake quantisation (STE)."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class QLinear(nn.Linear):
    def forward(self, x):
        w_scale = (self.weight.detach().abs().max() / 127).item()
        x_scale = (x.detach().abs().max().float() / 127).clamp(min=1e-4).item()
        w = torch.fake_quantize_per_tensor_affine(self.weight, w_scale, 0, -128, 127)
        x = torch.fake_quantize_per_tensor_affine(x.float(), x_scale, 0, -128, 127)
        return F.linear(x, w, self.bias)


model = nn.Sequential(QLinear(20, 64), nn.ReLU(), QLinear(64, 5)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(50):
    idx = torch.randint(0, 400, (50,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
