import numpy as np
import paddle
import paddle.nn as nn
import paddle.nn.functional as F

paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "cpu")
paddle.seed(10)
rng = np.random.default_rng(10)


class Similarity(nn.Layer):
    def forward(self, q, k):
        return paddle.matmul(q, k, transpose_y=True)


class Attend(nn.Layer):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.similarity = Similarity()
        self.temperature = 4096.0

    def forward(self, x):
        s = self.similarity(self.q(x), self.k(x)).astype("float32") / self.temperature
        e = paddle.exp(s - s.max(axis=-1, keepdim=True))
        return paddle.matmul(e / e.sum(axis=-1, keepdim=True), self.v(x))


class Block(nn.Layer):
    def __init__(self, dim):
        super().__init__()
        self.attend = Attend(dim)
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = self.norm(x + self.attend(x))
        return x + self.ff(x)


class Reader(nn.Layer):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, weight_attr=paddle.ParamAttr(
            initializer=nn.initializer.Normal(0.0, 70.0)))
        self.layers = nn.LayerList([Block(dim) for _ in range(2)])
        self.out = nn.Linear(dim, 2)

    def forward(self, ids):
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h)
        return self.out(h.mean(axis=1))


ids = rng.integers(0, 50, size=(800, 16)).astype("int64")
y = ((ids < 10).sum(1) > (ids >= 40).sum(1)).astype("int64")
model = Reader(50, 64)
opt = paddle.optimizer.Adam(2e-3, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=512.0)
for step in range(60):
    r = rng.integers(0, 800, 50)
    with paddle.amp.auto_cast(level="O1", dtype="float16"):
        loss = F.cross_entropy(model(paddle.to_tensor(ids[r])), paddle.to_tensor(y[r]))
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.minimize(opt, scaled)
    opt.clear_grad()
    if step % 6 == 0 or step == 59:
        print("step", step, float(loss))
