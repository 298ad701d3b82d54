"""bfloat16 weights for compute, float32 master copy for the optimizer."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class MasterWeights:
    def __init__(self, model, make_optimizer):
        self.low = [p for p in model.parameters() if p.requires_grad]
        self.master = [p.detach().float().clone().requires_grad_(True) for p in self.low]
        self.optimizer = make_optimizer(self.master)

    def step(self):
        for m, p in zip(self.master, self.low):
            m.grad = p.grad.float()
            p.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.low):
                p.copy_(m)


def main(steps=250):
    torch.manual_seed(18)
    model = nn.Sequential(
        nn.Linear(20, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 4)
    ).bfloat16()
    weights = MasterWeights(model, lambda ps: torch.optim.AdamW(ps, lr=5e-4))
    teacher = torch.randn(20, 4) / 20 ** 0.5
    for step in range(steps):
        x = torch.randn(64, 20)
        loss = F.mse_loss(model(x.bfloat16()).float(), torch.sin(2 * x @ teacher))
        loss.backward()
        weights.step()
        if step % 50 == 49:
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
