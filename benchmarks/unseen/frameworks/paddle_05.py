import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(31)
np.random.seed(31)

# reflectance cubes, 4 bands
base = np.random.rand(256, 4, 1, 1).astype("float32")
ramp = np.linspace(0, 1, 24, dtype="float32")
cubes = 2e-4 * (base * ramp[None, None, :, None] + 0.5 * np.random.rand(256, 1, 1, 24).astype("float32"))


class AutoEncoder(nn.Layer):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2D(4, 16, 3, stride=2, padding=1), nn.LeakyReLU(0.1),
            nn.Conv2D(16, 8, 3, stride=2, padding=1))
        self.decoder = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2D(8, 16, 3, padding=1), nn.LeakyReLU(0.1),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2D(16, 4, 3, padding=1))

    def forward(self, x):
        return self.decoder(self.encoder(x))


ae = AutoEncoder()
opt = paddle.optimizer.Adam(learning_rate=2e-4, epsilon=1e-15, parameters=ae.parameters())

for step in range(60):
    sel = np.random.permutation(256)[:64]
    xb = paddle.to_tensor(cubes[sel])
    with paddle.amp.auto_cast(level="O1", dtype="float16"):
        out = ae(xb)
    loss = F.mse_loss(out.astype("float32"), xb)
    loss.backward()
    opt.step()
    opt.clear_grad()
    if step % 6 == 0 or step == 59:
        print("step", step, "loss %.4e" % float(loss))
