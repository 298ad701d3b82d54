import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self, fin=16, classes=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(fin, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.body(x))


class Teacher:
    def __init__(self, student, decay=0.997):
        self.net = copy.deepcopy(student).to(torch.bfloat16).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, student):
        for t, s in zip(self.net.parameters(), student.parameters()):
            t.mul_(self.decay).add_(s.to(t.dtype), alpha=1 - self.decay)

    @torch.no_grad()
    def __call__(self, x):
        return self.net(x.to(torch.bfloat16)).float()


def labelled(n, centers):
    y = torch.randint(len(centers), (n,))
    return centers[y] + torch.randn(n, centers.shape[1]), y


def validate(predict, centers):
    x, y = labelled(512, centers)
    return F.cross_entropy(predict(x).float(), y).item()


def main(steps=700):
    torch.manual_seed(0)
    centers = torch.randn(6, 16)
    student = Net()
    teacher = Teacher(student)
    opt = torch.optim.AdamW(student.parameters(), lr=2e-3)
    for step in range(steps):
        x, y = labelled(64, centers)
        ramp = 0.1 * min(1.0, step / steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = student(x)
        target = teacher(x + 0.1 * torch.randn_like(x)).softmax(-1)
        loss = F.cross_entropy(out.float(), y) + ramp * F.mse_loss(out.float().softmax(-1), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        teacher.update(student)
        if step % 100 == 99:
            print(f"step {step + 1} train {loss.item():.4f} teacher val {validate(teacher, centers):.4f}")


if __name__ == "__main__":
    main()
