"""The simulated CUDA device against torch's own rules, which fake tensors follow without a
GPU: where each result is. And that nothing of it is left behind."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import operator
import pickle
import queue
import re
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampscope.capture.tensors import plain
from ampscope.ext.rehearsal.cuda_answers import CannotRehearseError
from ampscope.ext.rehearsal.simulated_device import simulated_cuda
from ampscope.policy.device_profiles import PROFILES


@pytest.fixture
def cuda() -> Iterator[None]:
    with simulated_cuda(PROFILES["a100"]):
        yield


def here() -> Tensor:
    return torch.arange(6.0).reshape(2, 3)


def there() -> Tensor:
    return torch.ones(2, 3, device="cuda")


PLACES: dict[str, Callable[[], Tensor]] = {
    "factory": there,
    "factory with an index": lambda: torch.zeros(2, device=torch.device("cuda", 0)),
    "factory without": lambda: torch.zeros(2),
    "like": lambda: torch.zeros_like(there()),
    "like, on the cpu": lambda: torch.zeros_like(there(), device="cpu"),
    "new_full": lambda: there().new_full((2,), 1.0),
    "new_tensor on the cpu": lambda: there().new_zeros(2, device="cpu"),
    "cuda()": lambda: here().cuda(),
    "cuda(0)": lambda: here().cuda(0),
    "to a number": lambda: here().to(0),
    "to a word": lambda: here().to("cuda"),
    "to a device and dtype": lambda: here().to("cuda", torch.float16),
    "to a dtype": lambda: there().to(torch.float16),
    "to a device, by place": lambda: here().to("cuda", torch.float16, False, True),
    "to a memory format, as modules do": lambda: torch.zeros(1, 2, 2, 2, device="cuda").to(
        None, None, False, memory_format=torch.channels_last
    ),
    "copied to a dtype": lambda: there().to(torch.float16, copy=True),
    "to another, copied": lambda: there().to(here(), False, True),
    "to another": lambda: here().to(there()),
    "to the cpu": lambda: there().to("cpu"),
    "cpu()": lambda: there().cpu(),
    "there and back": lambda: here().cuda().cpu() + 1,
    "arithmetic": lambda: there() * 2 + 1,
    "with a number on the cpu": lambda: there() * torch.tensor(2.0),
    "matmul": lambda: there() @ there().T,
    "chunk": lambda: there().chunk(3, -1)[1],
    "topk": lambda: there().topk(2).indices,
    "stack": lambda: torch.stack([there(), there()]),
    "a list of numbers of the device": lambda: torch.tensor([there().sum(), there().sum()]),
    "in place": lambda: here().copy_(there()),
    "in place there": lambda: there().copy_(here()),
    "view": lambda: there().view(-1)[2:],
    "softmax": lambda: torch.nn.functional.softmax(there(), -1),
    "where": lambda: torch.where(there() > 0, there(), 0.0),
    "device context": lambda: _in_context(),
    "parameter": lambda: nn.Parameter(there()),
    "module": lambda: nn.Linear(3, 2, device="cuda")(there()),
    "module, moved": lambda: nn.Linear(3, 2).cuda().weight,
    "module, moved to a device": lambda: nn.Linear(3, 2).to(torch.device("cuda")).weight,
    "module, moved to a number": lambda: nn.Linear(3, 2).to(0).weight,
    "buffer, moved": lambda: _one(nn.BatchNorm1d(3).to("cuda").running_mean),
    "module, moved back": lambda: nn.Linear(3, 2).cuda().cpu().weight,
    "data": lambda: there().data,
    "detached": lambda: there().detach(),
    "gradient": lambda: _gradient(),
    "of a function": lambda: _Double.apply(there()),
}


# Fake tensors cannot do these on a build without CUDA: an allocation of real memory, or backward.
NOT_FAKED = {
    "cuda()": "cuda", "cuda(0)": "cuda", "to a word": "cuda", "to a device and dtype": "cuda",
    "to a device, by place": "cuda",
    "a list of numbers of the device": "cpu",
    "there and back": "cpu", "in place there": "cuda", "view": "cuda", "module": "cuda",
    "module, moved": "cuda", "buffer, moved": "cuda", "module, moved back": "cpu",
    "gradient": "cuda",
    "to a number": "cuda", "module, moved to a device": "cuda", "module, moved to a number": "cuda",
}  # fmt: skip


def _one(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _in_context() -> Tensor:
    with torch.device("cuda"):
        return torch.rand(3)


def _gradient() -> Tensor:
    weight = there().requires_grad_()
    (weight * 3).sum().backward()
    return _one(weight.grad)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("name", PLACES)
def test_a_tensor_is_where_torch_says(name: str) -> None:
    if name in NOT_FAKED:
        expected = torch.device(NOT_FAKED[name], 0 if NOT_FAKED[name] == "cuda" else None)
    else:
        with FakeTensorMode():
            expected = PLACES[name]().device
    with simulated_cuda(PROFILES["a100"]):
        found = PLACES[name]()
        is_there = expected.type == "cuda"
        assert (found.device, found.is_cuda, found.is_cpu) == (expected, is_there, not is_there)
        assert found.get_device() == (0 if is_there else -1)
    assert found.device.type == "cpu"  # where it really is


MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "+": lambda a, b: a + b,
    "add": torch.add,
    "add_": lambda a, b: a.clone().add_(b),
    "+=": lambda a, b: operator.iadd(a.clone(), b),
    "-": lambda a, b: b - a,
    "/": lambda a, b: a / b,
    "<": lambda a, b: a < b,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "@": lambda a, b: a @ b.T,
    "mm": lambda a, b: torch.mm(a, b.T),
    "linear": nn.functional.linear,
    "mse_loss": nn.functional.mse_loss,
    "layer_norm": lambda a, b: nn.functional.layer_norm(a, (3,), b[0]),
    "embedding": lambda a, b: nn.functional.embedding(b.long(), a),
    "cross_entropy": lambda a, b: nn.functional.cross_entropy(a, b[:, 0].long()),
    "bce": lambda a, b: nn.functional.binary_cross_entropy_with_logits(a, target=b),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "gather": lambda a, b: a.gather(1, b.long() * 0),
    "index_select": lambda a, b: a.index_select(0, b[0, :1].long()),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 1.0),
    "index of the device": lambda a, b: b[a[0, :2].long()],
    "index of the cpu": lambda a, b: a[b[0, :2].long()],
    "copy_": lambda a, b: a.copy_(b),
    "item": lambda a, b: a[0, 0].copy_(b[0, 0]),
    "a number": lambda a, b: a * b[0, 0],
    "a number beside": lambda a, b: b * a[0, 0],
    "a number in place": lambda a, b: a.mul_(b.sum()),
    "to": lambda a, b: b.to(a) + a,
    "cpu": lambda a, b: a.cpu() + b,
    "like": lambda a, b: a + torch.zeros_like(b, device="cuda"),
    "a list": lambda a, b: torch.tensor([1.0, 2.0, 3.0]) + a,
    "clone": lambda a, b: a + b.clone().reshape(2, 3)[:1],
}

# The rules of TensorAdvancedIndexing.cpp and TensorIterator.cpp; the others move first.
NOT_FAKED_MIXED = {
    "index of the device": "indices should be either on cpu or on the same device",
    "a number beside": "Expected all tensors to be on the same device",
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_are_refused_where_torch_refuses_them(name: str) -> None:
    refused = ""
    with FakeTensorMode():
        try:
            MIXED[name](torch.empty(2, 3, device="cuda"), torch.empty(2, 3))
        except RuntimeError as error:
            refused = str(error)
    if "not linked with support" in refused:  # a fake cannot be moved or viewed on such a build
        refused = ""
    refused = refused or NOT_FAKED_MIXED.get(name, "")
    with simulated_cuda(PROFILES["a100"]):
        a, b = there(), torch.ones(2, 3)
        if refused:
            with pytest.raises(RuntimeError, match=r"on the same device|indices should be either"):
                MIXED[name](a, b)
        else:
            MIXED[name](a, b)


def _unknown() -> Tensor:
    """A tensor that a pickle made: nobody knows whether it would be on CUDA."""
    made: Tensor = pickle.loads(pickle.dumps(here()))
    return made


def _loaded() -> Tensor:
    file = io.BytesIO()
    torch.save(torch.ones(2, 3), file)
    file.seek(0)
    found: Tensor = torch.load(file)
    return found


def _data_parallel() -> Tensor:
    output: Tensor = nn.DataParallel(nn.Linear(3, 2).cuda())(here())
    return output


# What a GPU computes, or may compute, where a CPU is named or nothing is said.
NEVER_REFUSED: dict[str, Callable[[], Tensor]] = {
    "loaded": lambda: _loaded() + there(),
    "from a pickle": lambda: _unknown() + there(),
    "made where one of unknown place is": lambda: torch.ones(3, device=_unknown().device) * there(),
    "like one of unknown place": lambda: torch.zeros_like(_unknown()) + there(),
    "moved to one of unknown place": lambda: here().to(_unknown()) + there(),
    "moved to the device of one of unknown place": lambda: here().to(_unknown().device) + there(),
    "a model moved to such a device": lambda: nn.Linear(3, 2).to(_unknown().device)(there()),
    "from torch's own code": lambda: torch.distributions.Normal(0.0, 1.0).sample((3,)) + there(),
    "vmap": lambda: torch.vmap(lambda x: x * torch.ones(3, device=x.device))(there()) + there(),
    "a list without elements": lambda: torch.cat([torch.tensor([]), there()[0]]),
    "numbers of the cpu": lambda: torch.addcmul(there(), there(), torch.tensor(2.0)),
    "inputs of DataParallel": _data_parallel,
    "written into": lambda: there().index_fill_(1, torch.zeros(1).long().cuda(), 2.0),
    "assigned": lambda: _assigned(),
    "mask of the cpu": lambda: there()[torch.ones(2, 3) > 0],
    "a copy of a model": lambda: copy.deepcopy(nn.Linear(3, 2)).cuda()(there()),
    "one that learned of a place after a question": lambda: _after_a_question(),
}


def _assigned() -> Tensor:
    x = there()
    x[0] = torch.ones(3)
    x[:, 1] = 2.0
    x.data[1].copy_(torch.ones(3))
    return x


def _after_a_question() -> Tensor:
    mask = there() if _unknown().is_cuda else here()
    return mask * there()


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", NEVER_REFUSED)
def test_what_is_not_a_mistake_for_certain_is_never_refused(name: str) -> None:
    assert NEVER_REFUSED[name]().is_cuda


# Results that torch leaves on the CPU though they come of tensors on CUDA.
STAY: dict[str, Callable[[], Tensor]] = {
    "a list of numbers": lambda: torch.tensor([there().sum(), there().mean()]),
    "arange up to a number": lambda: torch.arange(there().sum()),
    "filled with a number": lambda: torch.full((2,), there().sum().item()),
    "one of many, by a number": lambda: torch.arange(3)[there().long().sum() - 6],
    "in the shape of another": lambda: torch.ones(3).expand_as(there()),
    "lengths of a packed sequence": lambda: _packed().batch_sizes,
    "lengths of a padded sequence": lambda: nn.utils.rnn.pad_packed_sequence(_packed())[1],
    "a copied model": lambda: copy.deepcopy(nn.Linear(3, 2)).weight.detach(),
}


def _packed() -> nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_padded_sequence(there().view(2, 1, 3), torch.tensor([2]))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", STAY)
def test_what_stays_on_the_cpu_meets_numpy_and_the_cpu(name: str) -> None:
    found = STAY[name]()
    assert not found.is_cuda
    assert found.numpy().size == found.numel()
    assert not (found + torch.ones(found.shape)).is_cuda


@pytest.mark.usefixtures("cuda")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("devices", [[0], None])
def test_distributed_data_parallel_moves_its_input_to_its_one_device(
    devices: list[int] | None,
) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2).cuda(), devices, None, 0)
        if devices:
            assert model(here()).is_cuda
        else:
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                model(here())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("cuda")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("first", ["nccl", "gloo"])
def test_a_group_has_the_backend_that_was_asked_for(first: str) -> None:
    dist = torch.distributed
    dist.init_process_group(first, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == dist.get_backend(dist.group.WORLD) == first
        assert dist.get_backend(dist.new_group([0])) == first
        assert dist.get_backend(dist.new_group([0], None, "nccl")) == "nccl"
        assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"
        found = torch.ones(2, device="cuda")
        dist.all_reduce(found)
        told: list[object] = [None]
        dist.all_gather_object(told, "a")  # torch asks for the backend here, to choose a device
        assert (found.tolist(), told) == ([1.0, 1.0], ["a"])
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("cuda")
def test_a_batch_of_workers_that_was_not_moved() -> None:
    data = torch.utils.data.TensorDataset(torch.rand(4, 3))
    (batch,) = next(iter(torch.utils.data.DataLoader(data, 2, num_workers=1)))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        nn.Linear(3, 2).cuda()(batch)


@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("error")
def test_a_recurrent_layer_does_not_warn_of_this_build() -> None:
    assert nn.GRU(3, 2).cuda()(there())[0].is_cuda


@pytest.mark.usefixtures("cuda")
def test_a_convolution_names_the_types() -> None:
    words = re.escape(
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same"
    )
    with pytest.raises(RuntimeError, match=words):
        nn.Conv1d(2, 2, 1).cuda()(torch.rand(1, 2, 3))


@pytest.mark.usefixtures("cuda")
def test_meta_tensors_stay_what_they_are() -> None:
    model = nn.Linear(3, 2).to("meta")
    assert model.weight.is_meta
    assert model.to_empty(device="cuda")(there()).is_cuda


@pytest.mark.usefixtures("cuda")
def test_a_model_whose_batch_or_weights_stayed_behind() -> None:
    model, x = nn.Linear(3, 2), torch.rand(4, 3)
    for mixed in (lambda: nn.Linear(3, 2).cuda()(x), lambda: model(x.cuda())):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mixed()
    assert model.cuda()(x.cuda()).is_cuda


@pytest.mark.usefixtures("cuda")
def test_moving_copies_and_staying_does_not() -> None:
    x = here()
    y = x.cuda()
    y.add_(1)
    assert x[0, 0] == 0
    assert y.cuda() is y
    assert y.to("cuda:0") is y
    assert x.to("cpu") is x
    assert y.cpu().data_ptr() != y.data_ptr()


@pytest.mark.usefixtures("cuda")
def test_gradients_flow_through_a_move() -> None:
    x = here().requires_grad_()
    (x.cuda() * 2).sum().backward()
    assert x.grad is not None
    assert not x.grad.is_cuda
    assert bool((x.grad == 2).all())


@pytest.mark.usefixtures("cuda")
def test_a_function_of_the_script_finds_the_device_in_its_backward() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * torch.ones(3, device="cuda")

    weight = there().requires_grad_()
    Own.apply(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.is_cuda


def test_a_script_and_its_libraries_find_the_device_and_torch_does_not() -> None:
    with simulated_cuda(PROFILES["t4"]):
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_name() == "Tesla T4"
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.cuda.get_device_properties(0).total_memory == 16 * 2**30
        assert torch.cuda.memory_allocated() == 0
        with torch.random.fork_rng():  # asks torch.cuda how many devices there are
            torch.rand(1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        end.record()
        assert begin.elapsed_time(end) >= 0
        with torch.cuda.stream(stream=torch.cuda.Stream(device="cuda")):
            torch.cuda.current_stream(device="cuda").synchronize()
        state = torch.cuda.get_rng_state(device="cuda")
        torch.cuda.set_rng_state(new_state=state, device="cuda")
        with pytest.raises(CannotRehearseError, match="CUDA graphs cannot be rehearsed"):
            torch.cuda.CUDAGraph()


def mib(count: int) -> int:
    return count * 2**20


# What torch's own source says of a Tesla T4 that holds nothing yet.
OF_A_T4: dict[str, object] = {
    "torch.cuda.is_bf16_supported()": True,
    "torch.cuda.is_bf16_supported(including_emulation=False)": False,
    "torch.cuda.is_tf32_supported()": False,
    "torch.cuda.memory.memory_allocated()": 0,
    "torch.cuda.memory.max_memory_allocated('cuda')": 0,
    "torch.cuda.memory_reserved(0)": 0,
    "torch.cuda.mem_get_info()": (mib(16384), mib(16384)),
    "torch.cuda.memory_snapshot()": [],
    "'allocated_bytes' in str(torch.cuda.memory_stats())": True,
    "'PyTorch CUDA memory summary, device ID 0' in torch.cuda.memory_summary()": True,
    "torch.cuda.list_gpu_processes()": "GPU:0\nno processes are running",
    "torch.cuda.get_per_process_memory_fraction()": 1.0,
    "torch.cuda.initial_seed() == torch.initial_seed()": True,
    "torch.cuda.random.get_rng_state().dtype": torch.uint8,
    "torch.cuda.FloatTensor(2).device": torch.device("cuda", 0),
    "torch.cuda.HalfTensor([1, 2]).dtype": torch.float16,
    "isinstance(torch.zeros(1, device='cuda'), torch.cuda.FloatTensor)": True,
    "isinstance(torch.zeros(1), torch.cuda.FloatTensor)": False,
    "torch.zeros(1).type(torch.cuda.HalfTensor).type()": "torch.cuda.HalfTensor",
    "torch.zeros(1).type('torch.cuda.FloatTensor').type()": "torch.cuda.FloatTensor",
    "torch.zeros(1).type()": "torch.FloatTensor",
    "torch.cuda.nccl.version()[0]": 2,
    "torch.cuda.get_sync_debug_mode()": 0,
    "str(torch.cuda.get_device_properties(0).uuid)": "00000000-0000-0000-0000-000000000000",
    "torch.cuda.get_device_properties(0).multi_processor_count": 40,
    "torch.cuda.get_device_properties('cuda').shared_memory_per_block": 49152,
    "torch.cuda.get_gencode_flags()": "-gencode compute=compute_75,code=sm_75",
    "torch.cuda.cudart().cudaMemGetInfo(0)": (mib(16384), mib(16384)),
    "torch.cuda.current_stream() == torch.cuda.default_stream()": True,
    "torch.cuda.Stream() == torch.cuda.Stream()": False,
    "torch.cuda.ExternalStream(7).cuda_stream": 7,
    "torch.cuda.stream(None).__enter__()": None,
    "torch.cuda.device_of(torch.zeros(1, device='cuda')).__enter__()": None,
    "torch.cuda.memory._snapshot()['segments']": [],
    "torch.accelerator.memory_allocated()": 0,
    "torch.accelerator.max_memory_reserved('cuda:0')": 0,
    "torch.accelerator.reset_peak_memory_stats()": None,
    "torch.accelerator.get_memory_info()": (mib(16384), mib(16384)),
    "torch.accelerator.current_stream() == torch.cuda.current_stream()": True,
    "torch.bfloat16 in torch.accelerator.get_device_capability()['supported_dtypes']": True,
    "torch.accelerator.current_accelerator(check_available=True)": torch.device("cuda"),
    "torch.backends.cudnn.version() > 90000": True,
    "torch.backends.cudnn.is_available()": True,
    "torch.backends.cudnn.is_acceptable(torch.zeros(1, device='cuda'))": True,
    "torch.backends.cudnn.is_acceptable(torch.zeros(1))": False,
    "torch.backends.cudnn.enabled": True,
    "torch.backends.cudnn.benchmark": False,
    "torch.backends.cuda.is_built()": True,
    "torch.backends.cuda.flash_sdp_enabled()": True,
    "torch.version.cuda > '12'": True,
    "torch.distributed.is_nccl_available()": True,
    "torch.Stream(device='cuda').device": torch.device("cuda", 0),
    "torch.Stream('cuda').query()": True,
    "isinstance(torch.cuda.Stream(), torch.Stream)": True,
    "isinstance(torch.Event('cuda'), torch.Event)": True,
    "torch.get_device_module()": torch.cuda,
    "torch.device(0)": torch.device("cuda", 0),
    "torch.device('cpu')": torch.device("cpu"),
    "torch.get_device_module('cpu')": torch.cpu,
    "torch.amp.is_autocast_available('cuda')": True,
    "torch.Generator(device='cuda').device": torch.device("cuda", 0),
    "torch.Generator().device": torch.device("cpu"),
    "isinstance(torch.default_generator, torch.Generator)": True,
    "torch.zeros(1, device='cuda').storage().device": torch.device("cuda", 0),
    "torch.zeros(1, device='cuda').untyped_storage().is_cuda": True,
    "torch.zeros(1).untyped_storage().device": torch.device("cpu"),
    "str(torch.zeros(1, device='cuda'))": "tensor([0.], device='cuda:0')",
    "str(torch.zeros(1))": "tensor([0.])",
    "f'{torch.ones(1, device=0)} {torch.ones((), device=0):.1f}'":
        "tensor([1.], device='cuda:0') 1.0",
    "repr(torch.nn.Parameter(torch.zeros(1, device='cuda')))":
        "Parameter containing:\ntensor([0.], device='cuda:0', requires_grad=True)",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("expression", OF_A_T4)
def test_a_script_is_answered_as_by_a_t4(expression: str) -> None:
    with simulated_cuda(PROFILES["t4"]):
        found = eval(expression, {"torch": torch, "__name__": "script"})
    assert found == OF_A_T4[expression]


@pytest.mark.parametrize(
    ("capability", "bf16"), [("v100", False), ("gtx1660", False), ("a100", True), ("h100", True)]
)
def test_bf16_and_tf32_follow_the_capability(capability: str, bf16: bool) -> None:
    with simulated_cuda(PROFILES[capability]):
        assert torch.cuda.is_bf16_supported()  # torch counts emulation, unless told otherwise
        assert torch.cuda.is_bf16_supported(including_emulation=False) is bf16
        assert torch.cuda.is_tf32_supported() is bf16


def documented(text: str | None) -> set[str]:
    """The keys that torch's docstring lists: ``"a.{b,c}.{d,e}"`` and the like."""
    found: set[str] = set()
    for pattern in re.findall(r'^ *- ((?:``"[a-z_.{},]+"``(?: / )?)+):', text or "", re.MULTILINE):
        for one in re.findall(r'"([^"]+)"', pattern):
            parts = [part.strip("{}").split(",") for part in one.split(".")]
            found |= {".".join(names) for names in itertools.product(*parts)}
    return found


@pytest.mark.usefixtures("cuda")
def test_memory_figures_have_the_documented_keys_and_are_zero() -> None:
    # A dictionary of private pools, and a name that torch's own code spells "allocation".
    other = {"reserved_bytes_by_private_pools"}
    keys = {
        k for k in documented(torch.cuda.memory_stats.__doc__) if not k.startswith("allocated.")
    }
    assert len(keys) > 80
    assert (
        keys - other <= torch.cuda.memory_stats().keys() == torch.accelerator.memory_stats().keys()
    )
    assert not any(v for k, v in torch.cuda.memory_stats().items() if k != "max_split_size")
    if hasattr(torch.cuda, "host_memory_stats"):
        keys = documented(torch.cuda.host_memory_stats.__doc__)
        assert keys == torch.cuda.host_memory_stats().keys()


def test_properties_have_the_names_of_torch() -> None:
    stub = (Path(torch.__file__).parent / "_C/__init__.pyi").read_text()
    names = re.findall(
        r"^    (\w+):",
        stub.partition("class _CudaDeviceProperties:")[2].split("\n\n")[0],
        re.MULTILINE,
    )
    with simulated_cuda(PROFILES["a100"]):
        facts = torch.cuda.get_device_properties(0)
    assert len(names) >= 15
    assert [name for name in names if not hasattr(facts, name)] == []


# Arguments of the functions that need some; `...` takes no call: a class or a module of its own.
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "set_device": (0,), "set_device_index": (0,), "set_device_idx": (0,), "manual_seed": (1,),
    "manual_seed_all": (1,), "set_sync_debug_mode": ("warn",), "can_device_access_peer": (0, 0),
    "set_per_process_memory_fraction": (0.5,), "check_error": (0,),
    "get_stream_from_external": (0,), "caching_allocator_alloc": (8,),
    "caching_allocator_delete": (0,), "change_current_allocator": (None,), "stream": (None,),
    "use_mem_pool": (None,), "caching_allocator_enable": (True,), "make_graphed_callables": (None,),
}  # fmt: skip


@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "module", [torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator]
)
def test_every_public_function_answers_or_says_that_it_cannot(module: types.ModuleType) -> None:
    failed = {}
    for name in module.__all__:
        function = getattr(module, name)
        if not inspect.isroutine(function):
            continue
        arguments = ARGUMENTS.get(name, ())
        if name in ("set_rng_state", "set_rng_state_all"):
            arguments = (getattr(torch.cuda, name.replace("set", "get"))(),)
        elif name == "set_stream":
            arguments = (torch.cuda.Stream(),)
        try:
            function(*arguments)
        except CannotRehearseError as error:
            if name not in str(error) and "graphs" not in str(error):
                failed[name] = error
        except Exception as error:
            failed[name] = error
    assert failed == {}


@pytest.mark.usefixtures("cuda")
def test_state_that_a_script_sets_is_what_it_reads() -> None:
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_per_process_memory_fraction(0.25)
    torch.backends.cuda.enable_flash_sdp(False)
    assert torch.cuda.get_sync_debug_mode() == 2
    assert torch.cuda.get_per_process_memory_fraction() == 0.25
    assert not torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(ValueError, match="Invalid fraction"):
        torch.cuda.set_per_process_memory_fraction(1.5)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side == torch.accelerator.current_stream()
    with side:
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == 0


@pytest.mark.usefixtures("cuda")
def test_numpy_takes_no_tensor_of_the_device() -> None:
    words = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu"
    for call in (lambda: there().numpy(), lambda: np.asarray(there()), lambda: np.sqrt(there())):
        with pytest.raises(TypeError, match=words):
            call()
    assert there().cpu().numpy().sum() == there().numpy(force=True).sum() == 6
    assert np.asarray(here()).shape == (2, 3)
    assert there().tolist() == [[1.0] * 3] * 2
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch.cuda.FloatTensor' only dense CPU"):
        there().pin_memory()


@pytest.mark.usefixtures("cuda")
def test_a_generator_of_another_device_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found"):
        torch.randn(2, device="cuda", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found"):
        torch.randperm(2, generator=torch.Generator("cuda"))
    seeded = [torch.Generator("cuda").manual_seed(3) for _ in range(2)]
    one, two = (torch.randn(2, device="cuda", generator=generator) for generator in seeded)
    assert one.is_cuda
    assert one.equal(two)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_runs_as_eager_code() -> None:
    with simulated_cuda(PROFILES["a100"]):
        with pytest.warns(UserWarning, match="torch.compile is not rehearsed: the eager code runs"):
            compiled = torch.compile(lambda x: x + 1)
        assert compiled(there()).is_cuda
    assert torch._dynamo.eval_frame._stance.stance == "default"  # type: ignore[attr-defined]


def test_the_old_default_tensor_type() -> None:
    with simulated_cuda(PROFILES["a100"]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_tensor_type("torch.cuda.HalfTensor")
        made = torch.zeros(2)
        assert (made.is_cuda, made.dtype) == (True, torch.float16)
        torch.set_default_tensor_type(torch.FloatTensor)
        assert not torch.zeros(2).is_cuda
    assert torch.zeros(2).dtype is torch.float32


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", ["CUDAGraph", "graph", "device", "Stream", "Event"])
def test_classes_stay_classes(name: str) -> None:
    assert isinstance(getattr(torch.cuda, name) | None, types.UnionType)


def test_each_rank_of_a_launcher_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with simulated_cuda(PROFILES["a100"]):
        assert (torch.cuda.device_count(), torch.accelerator.device_count()) == (2, 2)
        torch.cuda.set_device("cuda:1")
        assert (torch.cuda.current_device(), here().cuda().device.index) == (1, 1)
        with torch.cuda.device(0):
            assert torch.zeros(1, device="cuda").get_device() == 0
        torch.accelerator.set_device_index(0)
        assert torch.accelerator.current_device_index() == 0
        torch.cuda.set_device(1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    with simulated_cuda(PROFILES["a100"]):
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)


@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_ops_that_a_cpu_has_not_are_computed_in_fp32_and_rounded() -> None:
    wave = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).half()
    exact = np.fft.rfft(wave.cpu().double().numpy())
    given = wave.cuda().requires_grad_()
    found = torch.fft.rfft(given)
    assert (found.dtype, found.is_cuda) == (torch.complex32, True)
    np.testing.assert_allclose(found.detach().to(torch.complex64).cpu().numpy(), exact, 1e-3, 5e-3)
    size = found.abs()  # a CPU has no complex half at all
    assert (size.dtype, size.is_cuda) == (torch.float16, True)
    np.testing.assert_allclose(size.detach().cpu().float().numpy(), abs(exact), 2e-3, 1e-2)
    size.float().sum().backward()
    assert given.grad is not None
    assert given.grad.dtype is torch.float16
    again = wave.cpu().float().requires_grad_()
    torch.fft.rfft(again).abs().sum().backward()
    np.testing.assert_allclose(given.grad.cpu().float(), again.grad.numpy(), 1e-2, 2e-2)


@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_short_time_transform_and_activation_of_cuda_runs_in_half() -> None:
    wave, window = torch.randn(256).half().cuda(), torch.hann_window(64).half().cuda()
    short = torch.stft(wave, 64, window=window, return_complex=True)
    assert (short.dtype, short.is_cuda) == (torch.complex32, True)
    assert torch.istft(short, 64, window=window).dtype is torch.float16
    own = wave.clone()
    assert nn.functional.rrelu(own, training=True, inplace=True) is own
    assert own.is_cuda
    assert bool(((own / wave)[wave < 0] < 0.34).all())  # slopes between 1/8 and 1/3
    assert nn.functional.rrelu(wave).dtype is torch.float16


@pytest.mark.usefixtures("cuda")
def test_what_cuda_refuses_in_half_is_refused() -> None:
    with pytest.raises(RuntimeError, match="sizes are powers of two"):
        torch.fft.rfft(torch.randn(4, 60).half().cuda())
    with pytest.raises(RuntimeError, match="Half"):
        torch.linalg.inv(torch.eye(4).half().cuda())
    with pytest.raises(RuntimeError, match="Unsupported dtype Half"):
        torch.fft.rfft(torch.randn(4, 64).half())  # a CPU's own


@pytest.mark.usefixtures("cuda")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_what_ranks_do_by_nccl_alone_is_one_sentence() -> None:
    layer = torch.nn.modules._functions.SyncBatchNorm
    for call, name in (
        (lambda: layer.apply(there(), None, None, None, None, 1e-5, 0.1, None, 2), "SyncBatchNorm"),
        (lambda: torch.distributed._make_nccl_premul_sum(2.0), "PREMUL_SUM"),
    ):
        with pytest.raises(CannotRehearseError, match=f"{name}.* cannot be rehearsed on a CPU: "):
            call()


@pytest.mark.usefixtures("cuda")
def test_streams_and_backends_that_cpu_tensors_do_not_know() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = there()
    x.record_stream(side)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 2, 3)] * 3)
    # torch._dynamo, which optimizers import late, looks at what is inside.
    assert hasattr(torch.nn.attention.sdpa_kernel.__wrapped__, "__wrapped__")


class _Own(threading.Thread):
    def run(self) -> None:
        self.place = there().device


@pytest.mark.usefixtures("cuda")
def test_threads_of_the_script_find_the_device_and_their_own_default() -> None:
    own = _Own()
    own.start()
    own.join()
    with ThreadPoolExecutor(2) as pool, torch.device("cuda"):
        found = list(pool.map(lambda _: (here().cuda().device, here().device), range(3)))
        assert here().is_cuda
    assert str(own.place) == "cuda:0"
    assert [(str(moved), str(made)) for moved, made in found] == [("cuda:0", "cpu")] * 3


@pytest.mark.usefixtures("cuda")
def test_batches_come_from_workers_and_threads() -> None:
    made: queue.Queue[Tensor | None] = queue.Queue()

    def load() -> None:
        data = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(4, 2))
        for (x,) in torch.utils.data.DataLoader(data, 2, num_workers=1, pin_memory=True):
            made.put(x.cuda(non_blocking=True))
        made.put(None)

    thread = threading.Thread(target=load)
    thread.start()
    batches = list(iter(made.get, None))
    thread.join()
    assert [str(batch.device) for batch in batches] == ["cuda:0"] * 2


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}])
def test_optimizers_step_as_on_the_cpu(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    here_model = nn.Linear(4, 2)
    there_model = copy.deepcopy(here_model).cuda()
    x = torch.rand(8, 4)
    ours = torch.optim.AdamW(there_model.parameters(), **options)
    usual = torch.optim.AdamW(here_model.parameters())
    for _ in range(3):
        for model, optimizer, batch in ((there_model, ours, x.cuda()), (here_model, usual, x)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    assert there_model.weight.is_cuda
    assert ours.state[there_model.weight]["exp_avg"].is_cuda
    torch.testing.assert_close(plain(there_model.weight).cpu(), here_model.weight)


@pytest.mark.usefixtures("cuda")
def test_a_checkpoint_holds_nothing_of_it_and_comes_back_to_the_device() -> None:
    file = io.BytesIO()
    model = nn.Linear(3, 2).cuda()
    torch.save({"model": model.state_dict(), "one": there()}, file)
    assert b"_ampscope" not in file.getvalue()
    for place, is_there in (("cuda:0", True), ("cpu", False), (torch.device("cuda"), True)):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert loaded["one"].is_cuda is is_there
        assert loaded["model"]["weight"].is_cuda is is_there


def test_the_default_device() -> None:
    with simulated_cuda(PROFILES["a100"]):
        torch.set_default_device("cuda")
        assert torch.zeros(2).is_cuda
        assert nn.Linear(2, 2).weight.is_cuda
        with torch.device("cpu"):
            assert not torch.zeros(2).is_cuda
        torch.set_default_device(None)
        assert not torch.zeros(2).is_cuda


def test_nothing_is_left_behind() -> None:
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    kept = (torch.load, torch.Generator, nn.Parameter.__new__, torch.version.cuda)
    with simulated_cuda(PROFILES["a100"]):
        torch.Generator(device="cuda").manual_seed(3)
        loader = torch.utils.data.DataLoader([1, 2], pin_memory=True)
        assert len(list(loader)) == 2
    assert {name: getattr(torch.cuda, name) for name in dir(torch.cuda)} == before
    assert (torch.load, torch.Generator, nn.Parameter.__new__, torch.version.cuda) == kept
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
