"""Sequence reversal with nn.Transformer, padding and causal masks."""
import torch
from torch import nn
import torch.nn.functional as F

PAD, BOS = 0, 1
VOCAB, D = 24, 32


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, D, padding_idx=PAD), nn.Embedding(VOCAB, D, padding_idx=PAD)
        self.pos = nn.Parameter(torch.randn(16, D) * 0.1)
        self.core = nn.Transformer(D, 2, 1, 1, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(D, VOCAB)

    def forward(self, s, t):
        n = t.size(1)
        causal = torch.full((n, n), float("-inf")).triu(1)
        sp = torch.zeros(s.shape).masked_fill(s == PAD, float("-inf"))
        tp = torch.zeros(t.shape).masked_fill(t == PAD, float("-inf"))
        h = self.core(self.src(s) + self.pos[:s.size(1)], self.tgt(t) + self.pos[:n], tgt_mask=causal,
                      src_key_padding_mask=sp, tgt_key_padding_mask=tp, memory_key_padding_mask=sp)
        return self.out(h)


def pairs(n, longest=10):
    s = torch.full((n, longest), PAD)
    t = torch.full((n, longest + 1), PAD)
    t[:, 0] = BOS
    for i in range(n):
        k = int(torch.randint(2, longest + 1, ()))
        w = torch.randint(2, VOCAB, (k,))
        s[i, :k], t[i, 1:k + 1] = w, w.flip(0)
    return s, t


def main():
    torch.manual_seed(51)
    net = Seq2Seq()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.98))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 22)
    for i in range(250):
        s, t = pairs(32)
        with torch.autocast("cpu", dtype=torch.float16):
            o = net(s, t[:, :-1])
            loss = F.cross_entropy(o.float().flatten(0, 1), t[:, 1:].flatten(), ignore_index=PAD)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if i % 25 == 0 or i == 249:
            print(f"{i:3d} loss {loss.item():.4f} grad {norm:.3f} scale {scaler.get_scale():.0f}")


main()
