import argparse
import torch
from torch import nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=120)
ap.add_argument("--lr", type=float, default=3e-3)
ap.add_argument("--bs", type=int, default=16)
ap.add_argument("--init-scale", type=float, default=2.0 ** 24)
args = ap.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)
V = 9
codes = torch.randn(V, 20)


def batch():
    L = torch.randint(3, 7, (args.bs,))
    T = 40
    x = 0.3 * torch.randn(args.bs, T, 20)
    tgt = torch.zeros(args.bs, 6, dtype=torch.long)
    for i, l in enumerate(L.tolist()):
        s = torch.randint(1, V, (l,))
        tgt[i, :l] = s
        for k in range(l):
            x[i, 6 * k:6 * k + 5] += codes[s[k]]
    return x.to(device), tgt.to(device), torch.full((args.bs,), T // 2), L


class Rec(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(20, 48, 5, 2, 2), nn.ReLU(), nn.BatchNorm1d(48))
        self.rnn = nn.GRU(48, 48, batch_first=True, bidirectional=True)
        self.out = nn.Linear(96, V)

    def forward(self, x):
        h = self.front(x.transpose(1, 2)).transpose(1, 2)
        h, _ = self.rnn(h.float())
        return self.out(F.relu(h))


net = Rec().to(device)
opt = torch.optim.Adam(net.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler(device, init_scale=args.init_scale, growth_interval=500)
ctc = nn.CTCLoss(blank=0, zero_infinity=True, reduction="mean")
skipped = 0
for it in range(args.steps):
    x, t, xl, tl = batch()
    with torch.autocast(device, dtype=torch.float16):
        logits = net(x)
    lp = F.log_softmax(logits.float(), -1).transpose(0, 1)
    loss = ctc(lp, t, xl, tl)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    gn = nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    prev = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < prev:
        skipped += 1
        print("step", it, "grad norm", float(gn), "-> scale", scaler.get_scale())
    if it % 20 == 19:
        print(it, "loss %.4f" % loss.item(), "skipped", skipped)
