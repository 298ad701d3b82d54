"""Training scripts as users write them, one a way of training; each prints every bit of its losses.

``repr`` of a float and the bytes of a tensor: equal text is equal bits.
"""

HEAD = """\
import torch
from torch import nn
torch.manual_seed(0)
def net():
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1),
                         nn.Linear(32, 4))
def batch(): return torch.randn(8, 16), torch.randn(8, 4)
import hashlib
def bits(model):
    parts = [p.detach().float().contiguous().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()
mse = nn.functional.mse_loss
"""

SCRIPTS = {
    "fp16_scaler": """
model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**40)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
for i in range(6):
    x, y = batch()
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt); scaler.update()
    print(repr(loss.item()), repr(float(norm)), scaler.get_scale())
print(bits(model))
""",
    "bf16": """
model = net()
opt = torch.optim.Adam(model.parameters(), 1e-3)
for i in range(4):
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = mse(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    print(repr(loss.item()))
print(bits(model))
""",
    "half_model": """
model = net().half()
opt = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
for i in range(4):
    x, y = batch()
    loss = mse(model(x.half()).float(), y)
    opt.zero_grad(); loss.backward(); opt.step()
    print(repr(loss.item()), next(model.parameters()).dtype)
print(bits(model))
""",
    "lbfgs": """
model = net().eval()
opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
x, y = batch()
def closure():
    opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = mse(model(x), y)
    loss.backward()
    print("closure", repr(loss.item()))
    return loss
for i in range(3): print(repr(float(opt.step(closure))))
print(bits(model))
""",
    "autograd_grad": """
model = net()
for i in range(4):
    x, y = batch()
    x.requires_grad_()
    loss = mse(model(x), y)
    slope, = torch.autograd.grad(loss, x, create_graph=True)
    total = loss + slope.square().sum()
    grads = torch.autograd.grad(total, list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads): p -= 0.05 * g
    print(repr(total.item()))
print(bits(model))
""",
    "gan": """
make, judge = net(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opts = [torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.9)) for m in (make, judge)]
scalers = [torch.amp.GradScaler("cpu", init_scale=s) for s in (2.0**12, 2.0**30)]
bce = nn.functional.binary_cross_entropy_with_logits
for i in range(4):
    x, real = batch()
    with torch.autocast("cpu", torch.float16):
        fake = make(x)
        lost = bce(judge(real), torch.ones(8, 1)) + bce(judge(fake.detach()), torch.zeros(8, 1))
    opts[1].zero_grad(); scalers[1].scale(lost).backward()
    scalers[1].step(opts[1]); scalers[1].update()
    with torch.autocast("cpu", torch.float16):
        fooled = bce(judge(fake), torch.ones(8, 1))
    opts[0].zero_grad(); scalers[0].scale(fooled).backward()
    scalers[0].step(opts[0]); scalers[0].update()
    print(repr(lost.item()), repr(fooled.item()), [s.get_scale() for s in scalers])
print(bits(make), bits(judge))
""",
    "accumulation": """
model, scaler = net(), torch.amp.GradScaler("cpu")
opt = torch.optim.SGD(model.parameters(), 1e-2)
for i in range(8):
    x, y = batch()
    with torch.autocast("cpu", torch.float16):
        loss = mse(model(x), y) / 4
    scaler.scale(loss).backward()
    print(repr(loss.item()))
    if i % 4 == 3:
        scaler.step(opt); scaler.update(); opt.zero_grad()
print(bits(model))
""",
    "resume": """
import os, tempfile
model, scaler = net(), torch.amp.GradScaler("cpu", growth_interval=2)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
def train(steps):
    for i in range(steps):
        x, y = batch()
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = mse(model(x), y)
        scaler.scale(loss).backward(); scaler.step(opt); scaler.update()
        print(repr(loss.item()), scaler.get_scale())
train(3)
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "last.pt")
    torch.save({"m": model.state_dict(), "o": opt.state_dict(), "s": scaler.state_dict(),
                "rng": torch.get_rng_state()}, path)
    print(os.path.getsize(path))
    kept = torch.load(path, weights_only=True)
model = net(); opt = torch.optim.AdamW(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu")
model.load_state_dict(kept["m"]); opt.load_state_dict(kept["o"]); scaler.load_state_dict(kept["s"])
torch.set_rng_state(kept["rng"])
train(3)
print(bits(model))
""",
    "workers": """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(32, 16), torch.randn(32, 4))
model = net()
opt = torch.optim.SGD(model.parameters(), 1e-2)
for x, y in DataLoader(data, 8, shuffle=True, num_workers=2, multiprocessing_context="fork"):
    loss = mse(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    print(repr(loss.item()))
print(bits(model))
""",
    "compiled": """
model = torch.compile(net())
opt = torch.optim.SGD(model.parameters(), 1e-2)
@torch.compile
def objective(a, b): return mse(a, b)
for i in range(3):
    x, y = batch()
    loss = objective(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    print(repr(loss.item()))
print(bits(model), list(model.state_dict())[:2])
""",
    "evaluation": """
import copy, sys
model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
opt = torch.optim.SGD(model.parameters(), 1e-2)
average = copy.deepcopy(model)
for i in range(4):
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = mse(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters()): a.lerp_(p, 0.1)
model.eval()
with torch.no_grad(), torch.autocast("cpu", torch.float16):
    for i in range(2):
        x, y = batch()
        print(repr(mse(model(x), y).item()), repr(mse(average(x), y).item()))
with torch.inference_mode(): print(repr(model(x).sum().item()))
print(bits(model), bits(average))
sys.exit(7)
""",
    "nan_with_dropout": """
model = net()
opt = torch.optim.SGD(model.parameters(), 1e-3)
for i in range(4):
    x, y = batch()
    with torch.autocast("cpu", torch.float16):
        h = nn.functional.dropout(model(x) * 60000, 0.5) * 60000
        loss = h.float().mean() if i == 1 else mse(model(x), y)
    opt.zero_grad(); loss.backward()
    if i != 1: opt.step()
    print(repr(loss.item()), repr(torch.rand(1).item()))
""",
    "func_transforms": """
from torch.func import functional_call, grad, vmap
model = net().eval()
opt = torch.optim.SGD(model.parameters(), 1e-2)
for i in range(3):
    x, y = batch()
    opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        per_sample = vmap(grad(lambda row: model(row).sum()))(x)
        weights = dict(model.named_parameters())
        again = vmap(lambda row: functional_call(model, weights, (row,)))(x)
        loss = mse(model(x), y) + 0.01 * per_sample.square().mean() + 0.0 * again.mean()
    loss.backward(); opt.step()
    print(repr(loss.item()))
print(bits(model))
""",
    "meta_device": """
with torch.device("meta"):
    model = net()
    shapes = nn.Linear(16, 4)(torch.ones(2, 16) * torch.tensor(float("nan")))
assert shapes.shape == (2, 4)
model = model.to_empty(device="cpu")
for p in model.parameters(): nn.init.normal_(p, std=0.1)
spare = net()
opt = torch.optim.SGD(model.parameters(), 1e-2)
for i in range(3):
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = mse(model(x), y) + 0 * spare(x).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    print(repr(loss.item()))
spare.to("meta")
print(bits(model))
""",
    "forward_mode": """
import torch.autograd.forward_ad as forward
from torch.func import functional_call, jvp
model = net().eval()
opt = torch.optim.SGD(model.parameters(), 1e-2)
for i in range(3):
    x, y = batch()
    weights = dict(model.named_parameters())
    with torch.autocast("cpu", torch.float16):
        out, slope = jvp(lambda u: functional_call(model, weights, (u,)), (x,), (x * 0.1,))
    with forward.dual_level():
        tangent = forward.unpack_dual(model(forward.make_dual(x, torch.ones_like(x)))).tangent
        print(tangent.shape)  # its bits are others under any dispatch mode, by torch's own doing
    loss = mse(out.float(), y) + slope.float().square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    print(repr(loss.item()))
print(bits(model))
""",
    "tensors_without_plain_values": """
import warnings; warnings.simplefilter("ignore")
class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, t): return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)
    def __init__(self, t): self.t = t
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [a.t if isinstance(a, Wrapped) else a for a in args]
        return Wrapped(func(*inner, **(kwargs or {})))
from torch._subclasses.fake_tensor import FakeTensorMode
lin, spectrum = nn.Linear(4, 4), nn.Parameter(torch.randn(3, dtype=torch.cfloat))
opt = torch.optim.Adam([*lin.parameters(), spectrum], 1e-2)
for layout in (torch.strided, torch.jagged):
    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    with torch.autocast("cpu", torch.bfloat16):
        y = lin(torch.nested.nested_tensor(rows, layout=layout))
    loss = torch.nested.to_padded_tensor(y, 0.0).float().square().mean()
    compressed = torch.eye(4).to_sparse_csr()
    loss = loss + torch.sparse.mm(compressed, lin.weight).square().mean()
    loss = loss + torch.sparse.mm(torch.eye(4).to_sparse(), lin.weight).mean()
    wave = torch.fft.irfft(torch.fft.rfft(torch.randn(4)) * spectrum)
    loss = loss + wave.square().mean() + (spectrum.conj() * spectrum).real.mean()
    eighths = torch.randn(4, 4).to(torch.float8_e4m3fn)
    loss = loss + lin(eighths.float()).mean() + lin(((Wrapped(torch.ones(2, 4)) * 2).t)).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    print(repr(loss.item()))
with FakeTensorMode(): print(nn.Linear(4, 4)(torch.randn(2, 4)).shape)
print(bits(lin), repr(torch.view_as_real(spectrum.detach()).tolist()))
""",
    "sharded": """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = net()
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for part in [*model, model]: fully_shard(part, mesh=mesh, mp_policy=half)
spread = nn.Parameter(distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)]))
opt = torch.optim.AdamW([*model.parameters(), spread], 1e-2)
for i in range(4):
    x, y = batch()
    rows = (distribute_tensor(x, mesh, [Replicate()]) @ spread).to_local()
    loss = mse(model(rows).float(), y)
    opt.zero_grad(); loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    print(repr(loss.item()))
print([p.detach().to_local().double().sum().item() for p in [*model.parameters(), spread]])
dist.destroy_process_group()
""",
    "traced_and_exported": """
import warnings; warnings.simplefilter("ignore")
model = net().eval()
opt = torch.optim.SGD(model.parameters(), 1e-2)
def ops(traced): return str(traced.inlined_graph).count("aten::")
print(ops(torch.jit.trace(model, torch.ones(1, 16))))
for i in range(3):
    x, y = batch()
    loss = mse(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    print(repr(loss.item()))
with torch.no_grad():
    traced = torch.jit.trace(model, torch.ones(1, 16))
    print(ops(traced), repr(traced(torch.ones(1, 16)).tolist()))
print(torch.fx.symbolic_trace(model)(torch.ones(1, 16)).shape)
program = torch.export.export(model, (torch.ones(1, 16),))
print(len(program.graph.nodes), repr(program.module()(torch.ones(1, 16)).tolist()))
print(bits(model))
""",
}
