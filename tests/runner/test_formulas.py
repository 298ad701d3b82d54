"""What fp32 cannot compute either: impossible data, division by zero, the logarithm of zero.

Each script meets its trouble at step 7 (or 0) and is run as it is and in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.diagnosis.findings import Diagnosis, diagnose
from ampscope.launcher.script_runs import ScriptRuns
from tests.helpers.script_runner import OnDemand, Runner, quick, spec

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
m=nn.Sequential(nn.Linear(8,16),nn.ReLU(),nn.Linear(16,4))
o=torch.optim.SGD(m.parameters(),1e-2)
s=torch.amp.GradScaler("cpu",init_scale=1024.)
def go(loss):
    o.zero_grad(); s.scale(loss).backward(); s.step(o); s.update()
ac=lambda: torch.autocast("cpu",torch.float16)
"""
SCRIPTS = {}
SCRIPTS["ctc"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(10,4,8); y=torch.randint(1,4,(4,5))
    n=torch.tensor([5,5,5,5]); t=torch.tensor([10,10,10,10])
    if i==7: t[2]=3
    with ac():
        l=m(x)
        loss=F.ctc_loss(l.float().log_softmax(-1),y,t,n)
    go(loss)
"""
)
SCRIPTS["zero_by_zero"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8)
    if i==7: x[3]=0
    with ac():
        y=m(x/x.sum(1,keepdim=True))
        loss=y.float().square().mean()
    go(loss)
"""
)
SCRIPTS["norm_target"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8); t=torch.rand(6,4)
    if i==7: t[3]=0
    with ac():
        y=m(x)
    p=t/t.sum(-1,keepdim=True)
    loss=-(p*y.float().log_softmax(-1)).sum(-1).mean()
    go(loss)
"""
)
SCRIPTS["log0"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8); t=torch.rand(6,4)
    if i==7: t[3,1]=0
    with ac():
        y=m(x)
        loss=F.mse_loss(y.float(),t.log())
    go(loss)
"""
)
SCRIPTS["logloss"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8); t=torch.rand(6,4)
    with ac():
        y=m(x).float()
        p=F.relu(y)
        loss=-(t*torch.log(p)).mean()
    go(loss)
"""
)
SCRIPTS["sqrt_mse"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8)
    with ac():
        y=m(x).float()
        t=torch.randn(6,4) if i!=7 else y.detach()
        loss=torch.sqrt(F.mse_loss(y,t))
    go(loss)
"""
)
SCRIPTS["sqrt_mse_double"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8,requires_grad=True)
    with ac():
        y=m(x).float()
    g,=torch.autograd.grad(y.sum(),x,create_graph=True)
    if i==7: g=g*0
    loss=y.square().mean()+torch.sqrt(g.square().mean())
    go(loss)
"""
)
SCRIPTS["sqrt_mse_double2"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8,requires_grad=True)
    with ac():
        y=m(x).float()
    t=torch.randn(6,4) if i!=7 else y.detach()
    inner=torch.sqrt(F.mse_loss(y,t))
    g,=torch.autograd.grad(inner,x,create_graph=True)
    loss=y.square().mean()+g.square().mean()
    go(loss)
"""
)
SCRIPTS["sam"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8)
    if i==7: x[:]=0
    with ac(): loss=(m(x).float()).square().mean()*(0.0 if i==7 else 1.0)
    o.zero_grad(); loss.backward()
    n=torch.norm(torch.stack([p.grad.norm() for p in m.parameters()]))
    es=[]
    with torch.no_grad():
        for p in m.parameters():
            e=p.grad*(0.05/n); p.add_(e); es.append(e)
    o.zero_grad()
    with ac(): loss=m(x).float().square().mean()
    loss.backward()
    with torch.no_grad():
        for p,e in zip(m.parameters(),es): p.sub_(e)
    o.step()
"""
)
SCRIPTS["empty"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8); t=torch.randint(0,4,(6,))
    if i==7: t[:]=-100
    with ac(): loss=F.cross_entropy(m(x).float(),t)
    go(loss)
"""
)
SCRIPTS["empty_mask"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8); k=(torch.rand(6)>0.5).float()
    if i==7: k[:]=0
    with ac(): loss=(m(x).float().square().mean(1)*k).sum()/k.sum()
    go(loss)
"""
)
SCRIPTS["kl_target"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8); t=torch.randint(0,4,(6,))
    with ac(): y=m(x).float()
    p=F.softmax(y*(1e4 if i==7 else 1),-1); q=F.log_softmax(torch.randn(6,4),-1)
    loss=F.cross_entropy(y,t)+F.kl_div(q,p,reduction="batchmean")
    go(loss)
"""
)
SCRIPTS["acos"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8); e=F.normalize(torch.randn(6,4),dim=-1)
    with ac(): y=m(x).float()
    d=F.normalize(y,dim=-1)
    c=(d*e).sum(-1).clamp(-.99,.99)
    if i==7: c=c/c.abs().detach()
    loss=torch.acos(c).mean()
    go(loss)
"""
)
SCRIPTS["svd"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8)
    with ac(): y=m(x).float()
    a=y.reshape(6,2,2)
    if i==7: a=a*0+torch.eye(2)
    u,s1,v=torch.linalg.svd(a)
    loss=(u@v-torch.eye(2)).square().mean()
    go(loss)
"""
)
SCRIPTS["solve_left_out"] = (
    HEAD
    + """
for i in range(20):
    x=torch.randn(6,8); p=torch.randn(6,5,2)
    if i==7: p[2]=0
    with ac(): w=m(x).float().sigmoid()[:,:1]+p.new_ones(1)
    a=(p.mT*w[...,None])@p
    z,info=torch.linalg.solve_ex(a,torch.ones(6,2,1))
    loss=F.smooth_l1_loss(z[info==0],torch.zeros(1).expand_as(z[info==0]))
    go(loss)
"""
)

EXPECTED = {
    "kl_target": ("singular_gradient", "fp32 has it too", "kl_div"),
    "acos": ("singular_gradient", "fp32 has it too", "torch.acos"),
    "svd": ("singular_gradient", "fp32 has it too", "linalg.svd"),
    "solve_left_out": ("masked_branch_gradient", "in fp32 as well", "solve_ex"),
    "ctc": ("bad_input_data", "sample 2 of the batch", "ctc_loss"),
    "zero_by_zero": ("bad_input_data", "index 3", "x.sum(1"),
    "norm_target": ("bad_input_data", "index 3", "t.sum("),
    "log0": ("bad_input_data", "index 3", "t.log()"),
    "logloss": ("not_amp_divergence", "no precision computes at step 0", "torch.log(p)"),
    "sqrt_mse": ("singular_gradient", "fp32 has it too", "torch.sqrt"),
    "sqrt_mse_double": ("singular_gradient", "fp32 has it too", "torch.sqrt"),
    "sqrt_mse_double2": ("singular_gradient", "fp32 has it too", "torch.sqrt"),
    "sam": ("not_amp_divergence", "no precision computes at step 7", "0.05/n"),
    "empty": ("empty_loss_reduction", "the count is zero", "cross_entropy"),
    "empty_mask": ("empty_loss_reduction", "the count is zero", "k.sum()"),
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Diagnosis]]:
    folder = tmp_path_factory.mktemp("formulas")
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        run = Runner(runs)

        def made(name: str) -> Diagnosis:
            path = folder / f"{name}.py"
            path.write_text(SCRIPTS[name])
            started = {control: run.start(path, control=control) for control in ("as_is", "fp32")}
            views = {
                control: RunView(control, run_id, run.fetch(run_id).run.observations)
                for control, run_id in started.items()
            }
            return diagnose(Evidence(views, "native"))

        yield OnDemand(made)


@pytest.mark.parametrize(
    "name", quick(EXPECTED, "kl_target", "ctc", "norm_target", "log0", "sqrt_mse", "empty")
)
def test_the_cause_is_the_one_that_fp32_shares(name: str, judged: dict[str, Diagnosis]) -> None:
    cause, words, code = EXPECTED[name]
    (finding,) = judged[name].findings
    assert finding.cause == cause
    assert words in finding.verdict.reason
    assert code in finding.verdict.code
    assert finding.verdict.op
    assert f"{name}.py:" in finding.verdict.line
    assert finding.verdict.step == (0 if name == "logloss" else 7)
    assert "learning rate" not in finding.verdict.reason
