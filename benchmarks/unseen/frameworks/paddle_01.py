import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(4)
rng = np.random.RandomState(4)

area = rng.uniform(0.4, 2.5, size=(1024, 1))
other = rng.normal(size=(1024, 11))
X = np.concatenate([area, other], axis=1).astype("float32")
price = (210000.0 + 60000.0 * (area - 1.4) + 9000.0 * other[:, :1]).astype("float32")


class Body(nn.Layer):
    def __init__(self, d):
        super().__init__()
        self.fc1 = nn.Linear(12, d)
        self.fc2 = nn.Linear(d, d)

    def forward(self, x):
        return F.relu(self.fc2(F.relu(self.fc1(x))))


class Valuation(nn.Layer):
    def __init__(self):
        super().__init__()
        self.body = Body(192)
        self.head = nn.Sequential(nn.Dropout(0.0), nn.Linear(192, 1))

    def forward(self, x):
        return self.head(self.body(x))


model = Valuation()
opt = paddle.optimizer.Adam(learning_rate=0.03, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=128.0)

for step in range(70):
    rows = rng.randint(0, 1024, size=96)
    xb = paddle.to_tensor(X[rows])
    yb = paddle.to_tensor(price[rows])
    with paddle.amp.auto_cast(level="O1", dtype="float16"):
        pred = model(xb)
        loss = F.l1_loss(pred, yb)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.clear_grad()
    if step % 5 == 0 or step == 69:
        print("step %d mae %.1f" % (step, float(loss)))
