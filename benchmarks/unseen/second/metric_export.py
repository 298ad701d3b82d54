import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class Embedder(nn.Module):
    def __init__(self, fin=24, out=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(fin, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1, eps=1e-4)


def people(n, faces):
    who = torch.randint(len(faces), (n,))
    x = faces[who]
    return x + 0.4 * torch.randn_like(x), x + 0.4 * torch.randn_like(x), who


def triplet(a, p, who, margin=0.3):
    sim = a.float() @ p.float().t()
    same = who.unsqueeze(0) == who.unsqueeze(1)
    worst = sim.masked_fill(same, float("-inf")).amax(1)
    return F.relu(worst - sim.diagonal() + margin).mean()


@torch.no_grad()
def recall(model, faces):
    served = copy.deepcopy(model).half().eval()
    a, p, who = people(200, faces)
    za, zp = served(a.half()), served(p.half())
    return (who[(za @ zp.t()).argmax(1)] == who).float().mean().item()


def main(steps=240):
    torch.manual_seed(0)
    faces = torch.randn(30, 24)
    model = Embedder()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu")
    for s in range(steps):
        a, p, who = people(64, faces)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = triplet(model(a), model(p), who)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if s % 40 == 39:
            print(f"step {s + 1} loss {loss.item():.4f} recall@1 {recall(model, faces):.3f}")


if __name__ == "__main__":
    main()
