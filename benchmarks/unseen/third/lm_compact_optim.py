"""Character model with gated recurrent cell and a memory-lean optimizer."""
import math
import torch
from torch import nn
import torch.nn.functional as F


class LeanAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, state_dtype=torch.float16):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["t"] = 0
                    st["m"] = torch.zeros_like(p, dtype=torch.float32)
                    st["v"] = torch.zeros_like(p, dtype=self.state_dtype)
                st["t"] += 1
                st["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                v = st["v"].float().mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                st["v"].copy_(v)
                mhat = st["m"] / (1 - b1 ** st["t"])
                vhat = st["v"].float() / (1 - b2 ** st["t"])
                p.addcdiv_(mhat, vhat.sqrt().add_(group["eps"]), value=-group["lr"])


class GatedCell(nn.Module):
    def __init__(self, i, h):
        super().__init__()
        self.gates = nn.Linear(i + h, 2 * h)
        self.cand = nn.Linear(i + h, h)

    def forward(self, x, h):
        z, r = torch.sigmoid(self.gates(torch.cat([x, h], -1))).chunk(2, -1)
        c = torch.tanh(self.cand(torch.cat([x, r * h], -1)))
        return (1 - z) * h + z * c


class CharModel(nn.Module):
    def __init__(self, vocab, e=16, h=48):
        super().__init__()
        self.e, self.cell, self.out = nn.Embedding(vocab, e), GatedCell(e, h), nn.Linear(h, vocab)
        self.h = h

    def forward(self, ids):
        state, outs = torch.zeros(ids.size(0), self.h), []
        for t in range(ids.size(1)):
            state = self.cell(self.e(ids[:, t]), state)
            outs.append(self.out(state))
        return torch.stack(outs, 1)


TEXT = ("the quick brown fox jumps over the lazy dog while seven wizards quietly "
        "boxed eleven heavy jugs of liquid and the judge vexed by noise slept on ") * 20


def main():
    torch.manual_seed(12)
    chars = sorted(set(TEXT))
    data = torch.tensor([chars.index(c) for c in TEXT])
    net = CharModel(len(chars))
    opt = LeanAdam(net.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)
    for step in range(240):
        i = torch.randint(0, len(data) - 25, (24,))
        chunk = torch.stack([data[j:j + 25] for j in i])
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(chunk[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 30 == 0 or step == 239:
            print(f"step {step} nll {loss.item():.4f} bits {loss.item() / math.log(2):.3f}")


main()
