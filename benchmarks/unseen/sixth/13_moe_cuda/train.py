import torch
from torch import nn
import torch.nn.functional as F
from torch.amp import autocast, GradScaler, custom_fwd, custom_bwd

torch.manual_seed(9)


class ScaledReLU2(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        r = x.clamp(min=0)
        ctx.save_for_backward(r)
        return r * r

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, g):
        (r,) = ctx.saved_tensors
        return 2 * r * g


class Expert(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return self.b(ScaledReLU2.apply(self.a(x)))


class MoE(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleDict({f"e{i}": Expert(d) for i in range(n)})

    def forward(self, x):
        g = self.gate(x).float()
        top, idx = g.topk(2, -1)
        w = torch.full_like(g, float("-inf")).scatter(-1, idx, top).softmax(-1)
        out = torch.zeros_like(x)
        for i, e in enumerate(self.experts.values()):
            sel = (idx == i).any(-1)
            if sel.any():
                out[sel] = out[sel] + (e(x[sel]) * w[sel, i, None]).to(out.dtype)
        return x + out


class Net(nn.Module):
    def __init__(self, d=32, n=6):
        super().__init__()
        self.inp = nn.Linear(10, d)
        self.moe = MoE(d, n)
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, 4)

    def forward(self, x):
        return self.out(self.norm(self.moe(F.relu(self.inp(x)))))


teacher = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 4))
net = Net().cuda()
with torch.no_grad():
    net.moe.gate.weight[5] = -3.0
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = GradScaler("cuda", init_scale=2.0 ** 22)
bad = 0
for it in range(400):
    x = torch.randn(128, 10)
    y = (teacher(x) * 4).argmax(-1).cuda()
    x = x.cuda()
    with autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(net(x), y)
    if not torch.isfinite(loss):
        raise SystemExit("loss is not finite at %d" % it)
    opt.zero_grad(set_to_none=True)
    s0 = scaler.get_scale()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    bad += scaler.get_scale() < s0
    if it % 80 == 79:
        unused = [n for n, p in net.named_parameters() if p.grad is None]
        print(it, "%.4f" % loss.item(), "overflow steps", bad, "no grad:", unused)
