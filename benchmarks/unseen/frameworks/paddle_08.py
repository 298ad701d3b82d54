import numpy as np
import paddle
import paddle.nn as nn

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(6)
rng = np.random.RandomState(6)

X = rng.normal(size=(1000, 30)).astype("float32")
Y = (X[:, :4] - 0.5 * X[:, 4:8] ** 2).astype("float32")

network = nn.Sequential(
    nn.Linear(30, 80), nn.LeakyReLU(0.2),
    nn.Linear(80, 80), nn.LeakyReLU(0.2),
    nn.Linear(80, 4),
)
model = paddle.Model(network)
model.prepare(
    optimizer=paddle.optimizer.Momentum(
        learning_rate=0.7, momentum=0.9, parameters=network.parameters()),
    loss=nn.MSELoss(),
    amp_configs={"level": "O1", "init_loss_scaling": 256.0},
)
for step in range(50):
    idx = rng.choice(1000, 50)
    out = model.train_batch([X[idx]], [Y[idx]])
    print("step", step, "loss", float(np.ravel(out[0])[0]))
