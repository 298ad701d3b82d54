import numpy as np
import paddle
import paddle.nn as nn

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(7)
rng = np.random.default_rng(7)


class ConvUnit(nn.Layer):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv = nn.Conv2D(cin, cout, 3, stride=stride, padding=1, bias_attr=False)
        self.bn = nn.BatchNorm2D(cout)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class SmallNet(nn.Layer):
    def __init__(self, classes=4):
        super().__init__()
        self.stem = ConvUnit(3, 12)
        self.stage = nn.Sequential(ConvUnit(12, 24, 2), ConvUnit(24, 24))
        self.pool = nn.AdaptiveAvgPool2D(1)
        self.fc = nn.Linear(24, classes)

    def forward(self, x):
        x = self.pool(self.stage(self.stem(x)))
        return self.fc(paddle.flatten(x, 1))


labels = rng.integers(0, 4, size=640).astype("int64")
x = rng.normal(0, 1, size=(640, 3, 14, 14)).astype("float32")
for c in range(4):
    x[labels == c, c % 3] += 0.6 * (1 + c // 3)

model = SmallNet()
optimizer = paddle.optimizer.AdamW(2e-3, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=2.0 ** 32, use_dynamic_loss_scaling=False)
ce = nn.CrossEntropyLoss()

for epoch in range(4):
    order = rng.permutation(640)
    for i in range(0, 640, 40):
        b = order[i:i + 40]
        with paddle.amp.auto_cast(level="O1", dtype="float16"):
            loss = ce(model(paddle.to_tensor(x[b])), paddle.to_tensor(labels[b]))
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.minimize(optimizer, scaled)
        optimizer.clear_grad()
    print("epoch", epoch, "loss", float(loss))
