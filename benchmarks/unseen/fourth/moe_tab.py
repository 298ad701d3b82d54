"""Tabular mixture of experts. Phase one mixes all experts softly, phase two routes to the best one."""
import argparse
import warnings

import torch
from torch import nn
import torch.nn.functional as F


class RoutedLinear(torch.autograd.Function):
    """y[i] = x[i] @ W[e[i]]^T + b[e[i]] without materialising W[e]."""

    @staticmethod
    def forward(ctx, x, weight, bias, expert):
        ctx.save_for_backward(x, weight, expert)
        out = None
        for e in range(weight.shape[0]):
            rows = (expert == e).nonzero(as_tuple=True)[0]
            part = F.linear(x[rows], weight[e], bias[e])
            if out is None:
                out = part.new_zeros(x.shape[0], weight.shape[1])
            out[rows] = part
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, expert = ctx.saved_tensors
        gx, gw = torch.zeros_like(x), torch.zeros_like(weight)
        gb = weight.new_zeros(weight.shape[:2])
        for e in range(weight.shape[0]):
            rows = (expert == e).nonzero(as_tuple=True)[0]
            gx[rows] = grad[rows] @ weight[e]
            gw[e] = grad[rows].t() @ x[rows]
            gb[e] = grad[rows].sum(0)
        return gx, gw, gb, None


class ExpertBank(nn.Module):
    def __init__(self, n, d_in, d_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, d_out, d_in) / d_in ** 0.5)
        self.bias = nn.Parameter(torch.zeros(n, d_out))

    def forward(self, x, gate, hard):
        if hard:
            top, expert = gate.max(-1)
            y = RoutedLinear.apply(x, self.weight, self.bias, expert)
            return y * (top / top.detach()).unsqueeze(-1)
        y = torch.einsum("bi,eoi->beo", x, self.weight) + self.bias
        return (y * gate.unsqueeze(-1)).sum(1)


class MoENet(nn.Module):
    def __init__(self, d_in, width=48, experts=4):
        super().__init__()
        self.stem = nn.Linear(d_in, width)
        self.router = nn.Linear(d_in, experts)
        self.bank = ExpertBank(experts, width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x, hard=False):
        h = torch.relu(self.stem(x))
        gate = torch.softmax(self.router(x), -1)
        h = self.norm(h + torch.relu(self.bank(h, gate, hard)))
        return self.head(h).squeeze(-1), gate


def make_data(n, d, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    w = torch.randn(4, d, generator=g) / d ** 0.5
    which = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    y = 2 * (x * w[which]).sum(-1) + torch.sin(3 * x[:, 2])
    return x, y


def balance(gate):
    load = gate.float().mean(0)
    return (load * load).sum() * gate.shape[-1] - 1.0


class Runner:
    def __init__(self, args):
        self.args = args
        x, y = make_data(4096, 12, args.seed)
        self.train, self.valid = (x[:3584], y[:3584]), (x[3584:], y[3584:])
        self.model = MoENet(12)
        self.scaler = torch.amp.GradScaler("cpu", enabled=args.fp16)
        self.skipped = 0
        self.set_phase(False)

    def set_phase(self, hard):
        self.hard = hard
        lr = self.args.lr * (0.5 if hard else 1.0)
        groups = [{"params": self.model.router.parameters(), "lr": lr * (0.2 if hard else 1)},
                  {"params": [p for n, p in self.model.named_parameters() if not n.startswith("router")]}]
        self.opt = torch.optim.Adam(groups, lr=lr)

    def amp(self):
        return torch.autocast("cpu", dtype=torch.float16, enabled=self.args.fp16)

    def losses(self, x, y):
        with self.amp():
            pred, gate = self.model(x, self.hard)
        return F.smooth_l1_loss(pred.float(), y), balance(gate)

    def train_step(self, idx):
        x, y = self.train[0][idx], self.train[1][idx]
        task, bal = self.losses(x, y)
        try:
            self.opt.zero_grad(set_to_none=True)
            self.scaler.scale(task + self.args.balance * bal).backward()
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
            self.scaler.step(self.opt)
            self.scaler.update()
        except RuntimeError:  # out of memory on an unlucky routing
            self.skipped += 1
            self.opt.zero_grad(set_to_none=True)
        return task.item()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        task, _ = self.losses(*self.valid)
        self.model.train()
        return task.item()

    def phase(self, name, steps, hard):
        self.set_phase(hard)
        g = torch.Generator().manual_seed(self.args.seed + hard)
        total = 0.0
        for i in range(steps):
            total += self.train_step(torch.randint(len(self.train[0]), (self.args.batch,), generator=g))
            if (i + 1) % self.args.log == 0:
                print(f"{name} {i + 1:4d}  loss {total / self.args.log:.4f}  valid {self.evaluate():.4f}"
                      f"  skipped {self.skipped}", flush=True)
                total = 0.0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--soft-steps", type=int, default=80)
    p.add_argument("--hard-steps", type=int, default=160)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--balance", type=float, default=0.02)
    p.add_argument("--log", type=int, default=20)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    args = p.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    run = Runner(args)
    run.phase("soft", args.soft_steps, hard=False)
    run.phase("hard", args.hard_steps, hard=True)
    print(f"final loss {run.evaluate():.4f}")


if __name__ == "__main__":
    main()
