import torch
import torch.nn as nn
import torch.nn.functional as F


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Distiller:
    def __init__(self, teacher, student, temperature=1.0, alpha=0.7, lr=2e-3):
        self.teacher, self.student = teacher.eval(), student
        self.t, self.alpha = temperature, alpha
        self.opt = torch.optim.Adam(student.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu")

    def kd(self, s, t):
        p = torch.softmax(t / self.t, -1)
        logq = torch.log_softmax(s / self.t, -1)
        return (p * (torch.log(p) - logq)).sum(-1).mean() * self.t ** 2

    def step(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                t = self.teacher(x)
            s = self.student(x)
            loss = self.alpha * self.kd(s, t) + (1 - self.alpha) * F.cross_entropy(s, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()


def data(n, centers):
    y = torch.randint(len(centers), (n,))
    return centers[y] + 0.8 * torch.randn(n, centers.shape[1]), y


def main():
    torch.manual_seed(2)
    centers = 2.0 * torch.randn(10, 20)
    teacher, student = mlp(20, 128, 128, 10), mlp(20, 24, 10)
    opt = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(250):
        x, y = data(128, centers)
        opt.zero_grad()
        loss = F.cross_entropy(teacher(x), y)
        loss.backward()
        opt.step()
    print("teacher loss", round(loss.item(), 5))
    d = Distiller(teacher, student)
    for i in range(120):
        v = d.step(*data(128, centers))
        if i % 20 == 19:
            print(f"distill {i + 1} loss {v:.4f}")


if __name__ == "__main__":
    main()
