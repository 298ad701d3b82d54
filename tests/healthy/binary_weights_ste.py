"""Binary weights by a straight-through estimator: most effective weights stay as they are."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Sign(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=device)
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.sign()

    @staticmethod
    @torch.amp.custom_bwd(device_type=device)
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return g * (w.abs() <= 1)


class BinaryLinear(nn.Linear):
    def forward(self, x):
        alpha = self.weight.abs().mean(1, keepdim=True)
        return F.linear(x, alpha * Sign.apply(self.weight), self.bias)


model = nn.Sequential(BinaryLinear(20, 128), nn.Hardtanh(), BinaryLinear(128, 5)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)
x = torch.randn(400, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for step in range(60):
    idx = torch.randint(0, 400, (64,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x[idx]), y[idx])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for m in model:
            if isinstance(m, BinaryLinear):
                m.weight.clamp_(-1, 1)
    if step % 10 == 0:
        print(step, loss.item())
