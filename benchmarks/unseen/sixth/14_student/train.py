import torch
from torch import nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)


def mlp(*d):
    l = []
    for i in range(len(d) - 1):
        l += [nn.Linear(d[i], d[i + 1]), nn.ReLU()]
    return nn.Sequential(*l[:-1])


gt = mlp(16, 64, 6)
for p in gt.parameters():
    p.data.mul_(3)
teacher, student = mlp(16, 128, 128, 6).to(device), mlp(16, 64, 64, 6).to(device)
X = torch.randn(6000, 16)
Y = gt(X).argmax(1)
Xv, Yv = torch.randn(2000, 16), None
Yv = gt(Xv).argmax(1)


def fit_teacher():
    o = torch.optim.Adam(teacher.parameters(), 3e-3)
    for _ in range(400):
        i = torch.randint(0, len(X), (256,))
        l = F.cross_entropy(teacher(X[i].to(device)), Y[i].to(device))
        o.zero_grad()
        l.backward()
        o.step()
    teacher.eval().requires_grad_(False)


def acc(m):
    with torch.no_grad():
        return (m(Xv.to(device)).argmax(1).cpu() == Yv).float().mean().item()


fit_teacher()
print("teacher", acc(teacher))
# the student sees few labels but all the inputs
lab_x, lab_y = X[:100], Y[:100]
tau, alpha = 2.0, 0.9
opt = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device)
for step in range(600):
    i, j = torch.randint(0, len(lab_x), (64,)), torch.randint(0, len(X), (128,))
    xl, yl, xu = lab_x[i].to(device), lab_y[i].to(device), X[j].to(device)
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        out = student(torch.cat([xl, xu]))
        s_l, s_u = out[:64], out[64:]
        t_u = teacher(xu)
        ce = F.cross_entropy(s_l, yl)
        kd = F.kl_div(F.log_softmax(s_u.float() / tau, -1), F.softmax(t_u.float() / tau, -1), reduction="batchmean") * tau ** 2
    scaler.scale((1 - alpha) * ce).backward(retain_graph=True)
    (alpha * kd).backward()
    scaler.step(opt)
    scaler.update()
    if step % 100 == 99:
        print(step, "ce %.3f kd %.3f val acc %.3f" % (ce.item(), kd.item(), acc(student)))
