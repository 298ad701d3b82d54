"""Iterative refinement of a displacement; more iterations are used at evaluation."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class UpdateBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inp = nn.Linear(2 * dim, dim)
        self.delta = nn.Linear(dim, dim)

    def forward(self, state, ctx):
        h = torch.relu(self.inp(torch.cat([torch.tanh(state / 1000), ctx], dim=-1)))
        return state + self.delta(h)


class Refiner(nn.Module):
    def __init__(self, n_in=8, dim=48):
        super().__init__()
        self.context = nn.Linear(n_in, dim)
        self.start = nn.Linear(n_in, dim)
        self.update = UpdateBlock(dim)
        self.norm = nn.LayerNorm(dim)
        self.flow = nn.Linear(dim, 2)
        nn.init.normal_(self.update.delta.weight, std=700.0 / dim ** 0.5)

    def forward(self, x, iters):
        ctx = torch.tanh(self.context(x))
        state = self.start(x)
        for _ in range(iters):
            state = self.update(state, ctx)
        return self.flow(self.norm(state))


def pairs(n, mix, gen):
    x = torch.randn(n, 8, generator=gen)
    return x, torch.tanh(x @ mix)


@torch.no_grad()
def evaluate(model, mix, iters):
    model.eval()
    x, y = pairs(256, mix, torch.Generator().manual_seed(999))
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x, iters)
    model.train()
    return (out.float() - y).norm(dim=1).mean().item()


def main(train_iters=4, eval_iters=64):
    torch.manual_seed(20)
    gen = torch.Generator().manual_seed(200)
    mix = torch.randn(8, 2, generator=gen) / 2
    model = Refiner()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
    for step in range(120):
        x, y = pairs(48, mix, gen)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.l1_loss(model(x, train_iters), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 30 == 29:
            print(f"step {step + 1} loss {loss.item():.4f} endpoint error {evaluate(model, mix, eval_iters):.4f}")


if __name__ == "__main__":
    main()
