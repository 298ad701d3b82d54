"""What scripts do to the process that they run in, each in a few lines that come first."""

from __future__ import annotations

CHANGES = {
    "print": """
import builtins
real_print = builtins.print
def print(*args, **kwargs): real_print(*args, **kwargs)
builtins.print = print
""",
    "open": """
import builtins
real_open = builtins.open
def open(*args, **kwargs): return real_open(*args, **kwargs)
builtins.open = open
""",
    "__import__": """
import builtins
real_import = builtins.__import__
def watching(name, *args, **kwargs):
    if name.partition(".")[0] in ("numba", "llvmlite", "ampscope"): raise ImportError(name)
    return real_import(name, *args, **kwargs)
builtins.__import__ = watching
""",
    "stdout": """
import io, sys
kept = sys.stdout
class Quiet(io.StringIO):
    def write(self, text): return kept.write(text)
    def flush(self): raise RuntimeError("no")
sys.stdout = Quiet()
""",
    "excepthook": "import sys\nsys.excepthook = lambda *args: 1 / 0\n",
    "warnings are errors": "import warnings\nwarnings.simplefilter('error')\n",
    "NumPy raises": "import numpy\nnumpy.seterr(all='raise')\n",
    "fp64 by default": "torch.set_default_dtype(torch.float64)\n",
    "a default device": "torch.set_default_device('meta')\nDEVICE = 'cpu'\n",
    "one thread": "torch.set_num_threads(1)\n",
    "elsewhere": "import os, tempfile\nos.chdir(tempfile.mkdtemp())\n",
    "no environment": "import os\nos.environ.clear()\n",
    "signals": """
import signal
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
    signal.signal(one, lambda *args: None)
""",
    "a timer": """
import signal
signal.signal(signal.SIGALRM, lambda *args: None)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
""",
    "settrace": "import sys\nsys.settrace(lambda *args: None)\n",
    "atexit": "import atexit\natexit.register(lambda: 1 / 0)\n",
    "few files": """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (96, hard))
""",
    "few processes": """
import resource
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
resource.setrlimit(resource.RLIMIT_NPROC, (64, hard))
""",
    "little memory": """
import resource
pages = int(open("/proc/self/statm").read().split()[0])
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29), hard))
""",
    "spawns": """
import torch.multiprocessing
torch.multiprocessing.set_start_method("spawn", force=True)
""",
    "ends at once": "END = True\n",
    "setprofile": "import sys, threading\nsys.setprofile(lambda *args: None)\n"
    "threading.settrace(lambda *args: None)\n",
    "torch in parts": """
def through(function):
    def inner(*args, **kwargs): return function(*args, **kwargs)
    return inner
for owner, names in ((torch, "isfinite sum stack where empty zeros as_tensor no_grad"),
                     (torch.Tensor, "detach item to float cpu clone numpy view copy_ tolist")):
    for one in names.split(): setattr(owner, one, through(getattr(owner, one)))
""",
    "patched torch": """
call, backward = torch.nn.Module.__call__, torch.Tensor.backward
torch.nn.Module.__call__ = lambda self, *args, **kwargs: call(self, *args, **kwargs)
torch.Tensor.backward = lambda self, *args, **kwargs: backward(self, *args, **kwargs)
""",
    "no path": "import torch._dynamo\nimport sys\nsys.path[:] = []\n",
    "modules are gone": """
import sys
for name in [n for n in sys.modules if n.startswith("ampscope")]: del sys.modules[name]
""",
    "no collection": "import gc\ngc.disable(); gc.freeze()\n",
    "little recursion": "import sys\nsys.setrecursionlimit(400)\n",
}
