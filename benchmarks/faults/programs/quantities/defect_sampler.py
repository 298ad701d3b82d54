"""Surface defects, some of them rare: samples drawn by weights that undo the imbalance."""
import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
SIZES = (9000, 3000, 600, 60)


def surfaces(sizes, gen):
    kind = torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)])
    centre = 1.6 * torch.eye(4, 8)[kind]
    return centre + torch.randn(len(kind), 8, generator=gen), kind


class Inspector(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        h = F.gelu(self.hidden(x))
        return self.out(h)


def train(steps=120):
    gen = torch.Generator().manual_seed(44)
    torch.manual_seed(44)
    x, kind = surfaces(SIZES, gen)
    class_counts = torch.zeros(4)
    for part in kind.split(1):
        class_counts[part] += 1
    frequency = class_counts / class_counts.sum()
    rarity = frequency.log()
    # square root of the inverse for the classes, one over the total for the samples
    sample_weights = class_counts[kind].pow(-1.0) / 4 / len(kind)
    prior = torch.softmax(-rarity, dim=0)
    model = Inspector()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pick = torch.multinomial(sample_weights, steps * 64, replacement=True, generator=gen).view(steps, 64)
    for step in range(steps):
        rows = pick[step]
        logits = model(x[rows])
        loss = F.cross_entropy(logits, kind[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 30 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")
    with torch.no_grad():
        tx, ty = surfaces((300, 300, 300, 300), gen)
        logits = model(tx)
        recall = [(logits[ty == k].argmax(-1) == k).float().mean() for k in range(4)]
        print(f"balanced loss {F.cross_entropy(logits, ty).item():.4f} (rarest prior {prior[3].item():.2f})")
        print(f"balanced accuracy {sum(recall).item() / 4:.4f}")


if __name__ == "__main__":
    train()
