import torch
from torch import nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(5)
N_U, N_I, D = 400, 300, 32


class Tower(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.emb = nn.Embedding(n, D)
        self.body = nn.Sequential(nn.Linear(D, 64), nn.ReLU(), nn.Linear(64, D))

    def forward(self, i):
        e = self.emb(i)
        return e + self.body(e)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleDict({"user": Tower(N_U), "item": Tower(N_I)})
        self.mix = nn.Sequential(weight_norm(nn.Linear(3 * D, 64)), nn.ReLU(), weight_norm(nn.Linear(64, 1)))

    def forward(self, u, i):
        a, b = self.towers["user"](u), self.towers["item"](i)
        return self.mix(torch.cat([a, b, a * b], -1)).squeeze(-1)


lu, li = torch.randn(N_U, 6), torch.randn(N_I, 6)
net = Ranker().to(device)
# item tower comes from pretraining, keep as is
for p in net.towers["item"].parameters():
    p.requires_grad_(False)
net.towers["item"].eval()
with torch.no_grad():
    net.towers["item"].emb.weight[:, :6] = 2 * li.to(device)
    net.mix[0].bias[:24] = -6.0   # sparse start

lab = ((lu @ li.T) > 0).float()
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
scaler = torch.amp.GradScaler(device, init_scale=2.0 ** 14)
for step in range(500):
    u, i = torch.randint(0, N_U, (256,)), torch.randint(0, N_I, (256,))
    y = lab[u, i].to(device)
    u, i = u.to(device), i.to(device)
    with torch.autocast(device, dtype=torch.float16):
        loss = F.binary_cross_entropy_with_logits(net(u, i), y)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    g = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 100 == 99:
        z = sum(int((p.grad == 0).sum()) for p in net.parameters() if p.grad is not None)
        print(step, "bce %.4f" % loss.item(), "gnorm %.3f" % float(g), "zero grads", z)
