"""Regress a property of a set of points of varying size; padded batches, some sets are empty."""
import torch
import torch.nn as nn

torch.manual_seed(11)
torch.set_num_threads(1)

STEPS = 48
MAX_POINTS = 10
DIM = 24
LEARNING_RATE = 4e-3


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        x32 = x.float()
        scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x32 * scale).to(x.dtype) * self.weight


class AttentionPool(nn.Module):
    """One learnt query looks at all the points that are there."""

    def __init__(self, dim):
        super().__init__()
        self.query = nn.Parameter(torch.randn(dim) / dim**0.5)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)

    def forward(self, points, present):
        keys = self.key(points)
        scores = torch.matmul(keys, self.query) * keys.shape[-1] ** -0.5
        scores = scores.masked_fill(~present, -1e4)
        weights = torch.softmax(scores, dim=-1)
        return (weights.unsqueeze(-1) * self.value(points)).sum(dim=1)


class SetRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, DIM)
        self.norm = RMSNorm(DIM)
        self.hidden = nn.Linear(DIM, DIM)
        self.pool = AttentionPool(DIM)
        self.out = nn.Sequential(nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, 1))

    def forward(self, points, present):
        h = torch.relu(self.embed(points))
        h = h + self.hidden(self.norm(h))
        pooled = self.pool(h, present)
        return self.out(pooled).squeeze(-1)


def make_batch(n):
    size = torch.randint(0, MAX_POINTS + 1, (n,))
    present = torch.arange(MAX_POINTS) < size[:, None]
    points = torch.randn(n, MAX_POINTS, 3) * present[..., None]
    radius = points.norm(dim=-1)
    target = (radius * present).sum(1) / size.clamp(min=1)
    return points, present, target


model = SetRegressor()
opt = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
loss_fn = nn.MSELoss()

for it in range(1, STEPS + 1):
    points, present, target = make_batch(24)
    opt.zero_grad()
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        prediction = model(points, present)
        loss = loss_fn(prediction.float(), target)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it == 1 or it % 16 == 0:
        print("iter", it, "loss", round(loss.item(), 5), "scale", scaler.get_scale())

model.eval()
with torch.no_grad():
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        points, present, target = make_batch(128)
        error = loss_fn(model(points, present).float(), target)
print("final loss", round(error.item(), 5))
