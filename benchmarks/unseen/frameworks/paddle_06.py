import numpy as np
import paddle
import paddle.nn as nn
from paddle.nn.initializer import Normal, Uniform

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(23)
rng = np.random.default_rng(23)


class Calibrator(nn.Layer):
    def __init__(self, n_in):
        super().__init__()
        self.embed = nn.Linear(n_in, 8, weight_attr=paddle.ParamAttr(initializer=Normal(0.0, 1.0)))
        self.score = nn.Linear(8, 1, weight_attr=paddle.ParamAttr(initializer=Uniform(0.4, 0.9)))

    def forward(self, x):
        return self.score(self.embed(x))


net = Calibrator(512)
counts = rng.poisson(3.0, size=(1024, 512)).astype("float32")
with paddle.no_grad():
    readings = net(paddle.to_tensor(counts)).numpy() + 4.0

opt = paddle.optimizer.Adam(learning_rate=1e-5, parameters=net.parameters())
net, opt = paddle.amp.decorate(models=net, optimizers=opt, level="O2", dtype="float16", master_weight=False)
scaler = paddle.amp.GradScaler(init_loss_scaling=64.0)

for i in range(80):
    j = rng.integers(0, 1024, size=64)
    xb, yb = paddle.to_tensor(counts[j]), paddle.to_tensor(readings[j])
    with paddle.amp.auto_cast(level="O2", dtype="float16"):
        pred = net(xb)
    loss = nn.functional.mse_loss(pred.astype("float32"), yb)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.clear_grad()
    if i % 8 == 0 or i == 79:
        print("fine-tune %d  loss %.4f" % (i, float(loss)))
