"""A VQ-VAE: straight-through codes, a codebook moved by an average of its own, in fp32."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Codebook(nn.Module):
    def __init__(self, n=32, d=8, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(n, d))
        self.register_buffer("count", torch.ones(n))
        self.register_buffer("total", self.codes.clone())

    def forward(self, z):
        z = z.float()
        index = torch.cdist(z, self.codes).argmin(1)
        quantised = self.codes[index]
        if self.training:
            with torch.no_grad():
                one = F.one_hot(index, len(self.codes)).float()
                self.count.mul_(self.decay).add_(one.sum(0), alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(one.t() @ z.detach(), alpha=1 - self.decay)
                self.codes.copy_(self.total / (self.count[:, None] + 1e-5))
        commit = F.mse_loss(z, quantised)
        return z + (quantised - z).detach(), commit


encoder, decoder = nn.Linear(16, 8).to(device), nn.Linear(8, 16).to(device)
codebook = Codebook().to(device)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
scaler = torch.amp.GradScaler(device)
basis = torch.randn(3, 16, device=device)

for step in range(60):
    x = torch.randn(128, 3, device=device) @ basis
    with torch.autocast(device, dtype=torch.float16):
        z = encoder(x)
        with torch.autocast(device, enabled=False):
            q, commit = codebook(z)
        out = decoder(q)
        loss = F.mse_loss(out.float(), x) + 0.25 * commit
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
