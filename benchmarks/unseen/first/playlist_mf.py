"""Matrix factorisation of playlists, weights stored in bfloat16."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class Factors(nn.Module):
    def __init__(self, rows, cols, rank):
        super().__init__()
        self.row = nn.Embedding(rows, rank)
        self.col = nn.Embedding(cols, rank)
        self.scale = rank ** -0.5

    def forward(self, i, j):
        return (self.row(i) * self.col(j)).sum(-1) * self.scale


def main(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--steps", type=int, default=1500)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--dtype", default="bfloat16")
    a = p.parse_args(argv)
    torch.manual_seed(15)
    truth_r, truth_c = torch.randn(40, a.rank), torch.randn(50, a.rank)
    table = truth_r @ truth_c.t() * a.rank ** -0.5
    model = Factors(40, 50, a.rank).to(getattr(torch, a.dtype))
    opt = torch.optim.SGD(model.parameters(), lr=a.lr, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.5, 1.0, total_iters=50)
    window = []
    for step in range(a.steps):
        i, j = torch.randint(40, (256,)), torch.randint(50, (256,))
        loss = F.mse_loss(model(i, j).float(), table[i, j])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        window.append(loss.item())
        if step % 250 == 249:
            print(f"step {step + 1} mse {sum(window[-250:]) / 250:.4f} lr {sched.get_last_lr()[0]:.3f}")


if __name__ == "__main__":
    main()
