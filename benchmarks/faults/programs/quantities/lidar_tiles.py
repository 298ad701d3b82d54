"""Classify objects of a laser scan: points in metres of the national grid, a DataLoader, fp16 with a scaler."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
POINTS, KINDS = 32, 3


class Tiles(Dataset):
    """Poles, hedges and slabs: a cloud of points around a place on the map."""

    def __init__(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        self.kind = torch.randint(KINDS, (n,), generator=gen)
        shape = 0.2 + 0.9 * torch.eye(3)[self.kind]
        cloud = torch.randn(n, POINTS, 3, generator=gen) * shape[:, None]
        place = torch.tensor([4310.0, 5270.0, 412.0]) + 200 * torch.rand(n, 1, 3, generator=gen)
        scan_xyz = cloud + place
        self.xyz = scan_xyz
        self.echo = torch.rand(n, POINTS, 1, generator=gen)

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, index):
        points = self.xyz[index]
        local = points - points.mean(dim=0)
        return torch.cat([local, self.echo[index]], dim=-1), self.kind[index]


class CloudNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.point = nn.Linear(4, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, KINDS)

    def forward(self, cloud):
        h = F.relu(self.point(cloud))
        h = F.relu(self.mix(h))
        return self.head(h.mean(dim=1))


def run(epochs=3):
    torch.manual_seed(9)
    train = DataLoader(Tiles(1200, 1), batch_size=40, shuffle=True)
    held_out = DataLoader(Tiles(600, 2), batch_size=8)
    net = CloudNet()
    opt = torch.optim.Adam(net.parameters(), lr=8e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for epoch in range(epochs):
        for i, (cloud, kind) in enumerate(train):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(net(cloud), kind)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            if i == 0:
                print(f"epoch {epoch} loss {loss.item():.4f}")
    hits = torch.zeros(())
    total = 0.0
    net.eval()
    with torch.no_grad():
        for cloud, kind in held_out:
            logits = net(cloud)
            hits += (logits.argmax(-1) == kind).sum()
            total += F.cross_entropy(logits, kind).item() * len(kind)
    print(f"held-out loss {total / 600:.4f}")
    print(f"held-out accuracy {hits.item() / 600:.4f}")


if __name__ == "__main__":
    run()
