"""Semi-supervised classification: student, EMA teacher, consistency on unlabelled data."""
import copy

import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.l1 = nn.Linear(10, width)
        self.bn = nn.BatchNorm1d(width)
        self.l2 = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = F.relu(self.bn(self.l1(x)))
        x = F.relu(self.l2(x))
        return self.head(x)


def draw(n, g):
    y = torch.randint(3, (n,), generator=g)
    x = torch.randn(n, 10, generator=g)
    x[torch.arange(n), y] += 2.0
    return x, y


def update_teacher(teacher, student, momentum):
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.mul_(momentum).add_(s, alpha=1 - momentum)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(81)
    g = torch.Generator().manual_seed(81)
    student = Net()
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(60):
        x, y = draw(24, g)
        u, _ = draw(48, g)
        noisy = u + 0.1 * torch.randn(u.shape, generator=g)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = student(x)
            supervised = F.cross_entropy(logits, y)
            agree = F.mse_loss(student(noisy).softmax(-1).float(), teacher(u).softmax(-1).float())
            loss = supervised + min(1.0, step / 30) * agree
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        update_teacher(teacher, student, 0.9)
        if step % 15 == 0:
            print(f"step {step:2d} loss {loss.item():.4f} consistency {agree.item():.5f}")
    student.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        x, y = draw(256, g)
        print(f"student loss {F.cross_entropy(student(x), y).item():.4f}")


if __name__ == "__main__":
    main()
