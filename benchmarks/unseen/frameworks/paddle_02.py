import numpy as np
import paddle
from paddle import nn

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(12)
np.random.seed(12)

LR = 0.8
y = np.random.randint(0, 3, 900)
imgs = np.random.randn(900, 1, 12, 12).astype("float32") * 0.7
imgs[y == 0, :, :6] += 0.8
imgs[y == 1, :, 6:] += 0.8
imgs[y == 2, :, :, 4:8] += 0.8

net = nn.Sequential(
    nn.Conv2D(1, 8, 3, padding=1), nn.BatchNorm2D(8), nn.ReLU(), nn.MaxPool2D(2),
    nn.Conv2D(8, 16, 3, padding=1), nn.BatchNorm2D(16), nn.ReLU(),
    nn.AdaptiveAvgPool2D(2), nn.Flatten(), nn.Linear(64, 3),
)
criterion = nn.CrossEntropyLoss()
sched = paddle.optimizer.lr.LinearWarmup(LR, warmup_steps=8, start_lr=0.05, end_lr=LR)
opt = paddle.optimizer.Momentum(sched, momentum=0.5, parameters=net.parameters())

for it in range(60):
    k = np.random.choice(900, 60, replace=False)
    loss = criterion(net(paddle.to_tensor(imgs[k])), paddle.to_tensor(y[k]))
    loss.backward()
    opt.step()
    opt.clear_grad()
    sched.step()
    if it % 4 == 0 or it == 59:
        print(it, round(float(loss), 4), "lr", round(opt.get_lr(), 3))
