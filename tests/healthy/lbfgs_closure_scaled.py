"""L-BFGS under AMP: its closure scales the loss and divides the gradients, many times a step."""

import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
x_all = torch.randn(512, 16)
y_all = teacher(x_all).argmax(1)


def batches(n):
    g = torch.Generator().manual_seed(1)
    for _ in range(n):
        i = torch.randint(0, 512, (32,), generator=g)
        yield x_all[i], y_all[i]


def net():
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


model = net()

opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=8)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
x, y = x_all[:256], y_all[:256]


def closure():
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    inverse = 1.0 / scaler.get_scale()
    for p in model.parameters():
        p.grad.mul_(inverse)
    return loss


for step in range(25):
    loss = opt.step(closure)
    if step % 5 == 0:
        print("step", step, "loss", float(loss))
