"""Fine-tune a small net and keep an exponential moving average of its weights for sampling."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(4, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        return self.out(torch.tanh(self.lift(x)))


class EMAModel:
    def __init__(self, model, decay):
        self.decay = decay
        self.model = copy.deepcopy(model).to(torch.bfloat16).requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.copy_(e * self.decay + p.to(e.dtype) * (1 - self.decay))


def evaluate(net, x, y):
    with torch.no_grad(), torch.autocast(x.device.type, dtype=torch.float16):
        return F.mse_loss(net(x).float(), y).item()


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Denoiser().to(device)
    with torch.no_grad():
        for p in model.parameters():  # pretrained weights are of order one
            p.normal_()
    ema = EMAModel(model, decay=0.99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device)
    held_out = torch.randn(256, 4, device=device)

    for step in range(250):
        x = torch.randn(64, 4, device=device)
        with torch.autocast(device, dtype=torch.float16):
            loss = F.mse_loss(model(x), torch.sin(2 * x))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ema.update(model)
        if step % 60 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    target = torch.sin(2 * held_out)
    print(f"model {evaluate(model, held_out, target):.4f}")
    print(f"ema   {evaluate(ema.model, held_out, target):.4f}")


if __name__ == "__main__":
    main()
