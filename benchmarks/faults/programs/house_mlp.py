"""Tabular regression; half precision by hand (no autocast): casts in the model, fp32 weights."""
import torch
import torch.nn as nn

torch.set_num_threads(1)


class HalfLinear(nn.Linear):
    """fp32 weights, fp16 product."""

    def forward(self, x):
        return nn.functional.linear(x.to(torch.float16), self.weight.to(torch.float16), self.bias.to(torch.float16))


class PriceModel(nn.Module):
    def __init__(self, features=9, width=32):
        super().__init__()
        self.inp = HalfLinear(features, width)
        self.mid = HalfLinear(width, width)
        self.out = HalfLinear(width, 1)

    def forward(self, rows):
        h = torch.relu(self.inp(rows))
        h = torch.relu(self.mid(h)) + h
        return self.out(h).squeeze(-1)


def houses(n, gen):
    rows = torch.randn(n, 9, generator=gen)
    price = rows[:, 0] * rows[:, 1] + rows[:, 2].abs() - 0.5 * rows[:, 3]
    return rows, price + 0.05 * torch.randn(n, generator=gen)


def main(steps=70):
    torch.manual_seed(131)
    gen = torch.Generator().manual_seed(131)
    net = PriceModel()
    opt = torch.optim.NAdam(net.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for i in range(steps):
        rows, price = houses(48, gen)
        guess = net(rows)
        loss = (guess.float() - price).pow(2).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if i % 20 == 0:
            print(f"step {i:2d} loss {loss.item():.4f}")
    with torch.no_grad():
        rows, price = houses(512, gen)
        print(f"test loss {(net(rows).float() - price).pow(2).mean().item():.4f}")


if __name__ == "__main__":
    main()
