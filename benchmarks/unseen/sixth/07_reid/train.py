import torch
from torch import nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(7)
N_ID, P, K = 40, 8, 4
protos = torch.randn(N_ID, 3, 24, 12)


def pk_batch():
    ids = torch.randperm(N_ID)[:P].repeat_interleave(K)
    x = protos[ids] + 0.9 * torch.randn(P * K, 3, 24, 12)
    return x.to(device), ids.to(device)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1),
                                  nn.BatchNorm2d(48), nn.ReLU())
        self.embed = nn.Linear(48 * 18, 32)
        self.bnneck = nn.BatchNorm1d(32)
        self.cls = nn.Linear(32, N_ID, bias=False)

    def forward(self, x):
        f = self.embed(self.conv(x).flatten(1))
        return f, self.cls(self.bnneck(f))


def euclidean_dist(x):
    gram = x @ x.t()
    sq = gram.diagonal()
    dist = sq[:, None] + sq[None, :] - 2 * gram
    return dist.clamp(min=1e-12).sqrt()  # for numerical stability


def hard_triplet(f, ids, margin=0.3):
    d = euclidean_dist(f)
    same = ids[:, None] == ids[None]
    d_ap = d.masked_fill(~same, 0).max(1)[0]
    d_an = d.masked_fill(same, 1e4).min(1)[0]
    return F.margin_ranking_loss(d_an, d_ap, torch.ones_like(d_an), margin=margin)


def main():
    net = Net().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device)
    for step in range(120):
        x, ids = pk_batch()
        opt.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            feat, logit = net(x)
            id_loss = F.cross_entropy(logit, ids, label_smoothing=0.1)
            tri = hard_triplet(feat, ids)
            loss = id_loss + tri
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 19:
            acc = (logit.argmax(1) == ids).float().mean().item()
            print(f"{step} id {id_loss.item():.3f} tri {tri.item():.3f} acc {acc:.2f}")


if __name__ == "__main__":
    main()
