"""CPU flags from texts in the format of /proc/cpuinfo and sysctl, and the CPU of this machine.

The texts are written after the kernel's format (arch/x86/kernel/cpu/proc.c, arch/arm64/kernel/
cpuinfo.c) with the flags that the chips have; they are shortened, not recorded.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampscope.hardware import cpu as room
from ampscope.hardware.cpu import half_flags, parse_cpuinfo, parse_sysctl, read_cpu

SAPPHIRE_RAPIDS = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse sse2 avx f16c rdrand avx2 avx512f avx512dq avx512bw avx512vl avx_vnni \
avx512_bf16 avx512vbmi avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8 flush_l1d
vmx flags\t: vnmi preemption_timer
bogomips\t: 4000.00

processor\t: 1
model name\t: another one, which must not win
flags\t\t: fpu
"""
GRANITE_RAPIDS = SAPPHIRE_RAPIDS.replace("amx_tile", "amx_tile amx_fp16").replace("8480+", "6980P")
ZEN4 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9354 32-Core Processor
flags\t\t: fpu sse sse2 fma avx f16c avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16 clzero \
avx512_vnni avx512_bitalg
power management: ts ttp tm
"""
HASWELL = "model name\t: Intel(R) Core(TM) i7-4770 CPU @ 3.40GHz\nflags\t\t: fpu avx f16c avx2\n"
NEOVERSE_V2 = """\
processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd aes fphp asimdhp cpuid asimddp sve sve2 svei8mm svebf16 i8mm bf16 dgh
CPU implementer\t: 0x41
CPU part\t: 0xd4f
CPU revision\t: 0
"""
NEOVERSE_N1 = (
    "Features\t: fp asimd fphp asimdhp asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
)
POWER9 = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 2166.000000MHz\n"


@pytest.mark.parametrize(
    ("text", "model", "bf16", "fp16"),
    [
        (
            SAPPHIRE_RAPIDS,
            "Intel(R) Xeon(R) Platinum 8480+",
            ("AMX-BF16", "AVX512-BF16"),
            ("AVX512-FP16",),
        ),
        (
            GRANITE_RAPIDS,
            "Intel(R) Xeon(R) Platinum 6980P",
            ("AMX-BF16", "AVX512-BF16"),
            ("AMX-FP16", "AVX512-FP16"),
        ),
        (ZEN4, "AMD EPYC 9354 32-Core Processor", ("AVX512-BF16",), ()),
        (HASWELL, "Intel(R) Core(TM) i7-4770 CPU @ 3.40GHz", (), ()),
        (NEOVERSE_V2, "Arm Neoverse-V2", ("BF16",), ("ASIMDHP",)),
        (NEOVERSE_N1, "Arm Neoverse-N1", (), ("ASIMDHP",)),
        (POWER9, None, None, None),
        ("", None, None, None),
    ],
    ids=["sapphire-rapids", "granite-rapids", "zen4", "haswell", "v2", "n1", "power9", "empty"],
)
def test_cpuinfo(text: str, model: str | None, bf16: object, fp16: object) -> None:
    found, flags = parse_cpuinfo(text)
    assert found == model
    assert half_flags(flags, "bf16") == bf16
    assert half_flags(flags, "fp16") == fp16


def test_all_flags_of_the_first_processor() -> None:
    assert parse_cpuinfo(SAPPHIRE_RAPIDS)[1] == (
        "AVX2",
        "F16C",
        "AVX-512F",
        "AVX512-BF16",
        "AVX512-FP16",
        "AMX-BF16",
        "AMX-INT8",
    )
    assert parse_cpuinfo(NEOVERSE_V2)[1] == ("FPHP", "ASIMDHP", "BF16", "I8MM", "SVE")
    assert parse_cpuinfo(HASWELL)[1] == ("AVX2", "F16C")  # F16C converts, it does not multiply


def test_an_arm_core_that_is_not_listed_is_named_by_its_numbers() -> None:
    model, _ = parse_cpuinfo("CPU implementer\t: 0x61\nCPU part\t: 0x032\n")
    assert model == "ARM implementer 0x61, part 0x032"


# Apple names each feature: developer.apple.com, "Determining instruction set characteristics".
APPLE_M2 = """\
machdep.cpu.cores_per_package: 8
machdep.cpu.brand_string: Apple M2
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_SME: 0
"""
APPLE_M1 = APPLE_M2.replace("BF16: 1", "BF16: 0").replace("I8MM: 1", "I8MM: 0").replace("M2", "M1")
INTEL_MAC = """\
machdep.cpu.brand_string: Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz
machdep.cpu.features: FPU VME SSE SSE2 AVX1.0 F16C
machdep.cpu.leaf7_features: RDWRFSGS BMI1 AVX2 BMI2
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (APPLE_M2, ("Apple M2", ("FPHP", "ASIMDHP", "BF16", "I8MM"))),
        (APPLE_M1, ("Apple M1", ("FPHP", "ASIMDHP"))),
        (INTEL_MAC, ("Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz", ("AVX2", "F16C"))),
        ("", (None, None)),
    ],
)
def test_sysctl(text: str, expected: object) -> None:
    assert parse_sysctl(text) == expected


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    for parse in (parse_cpuinfo, parse_sysctl):
        model, flags = parse(text)
        assert model is None or isinstance(model, str)
        assert flags is None or isinstance(flags, tuple)


def test_this_machine() -> None:
    reading = read_cpu()
    assert reading.architecture == platform.machine()
    assert reading.logical_cores == psutil.cpu_count()
    assert 0 < reading.memory_available_bytes <= reading.memory_total_bytes
    if platform.system() == "Linux":
        assert reading.usable_cores == len(os.sched_getaffinity(0))
        assert reading.flags is not None or "flags" not in Path("/proc/cpuinfo").read_text()


def test_flags_and_the_container_limit_come_from_the_given_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(ZEN4)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("2147483648\n")
    reading = read_cpu(tmp_path)
    assert (reading.model, reading.memory_limit_bytes) == (
        "AMD EPYC 9354 32-Core Processor",
        2**31,
    )
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert read_cpu(tmp_path).memory_limit_bytes is None


@pytest.mark.parametrize("system", ["Windows", "Linux", "FreeBSD"])
def test_where_nothing_can_be_read_flags_are_unknown(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    assert read_cpu(tmp_path / "nothing here").flags is None


def test_macos_asks_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=APPLE_M2)

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(room.subprocess, "run", run)
    assert read_cpu().model == "Apple M2"
    assert asked == [["/usr/sbin/sysctl", "machdep.cpu", "hw.optional"]]


def test_macos_whose_sysctl_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, room.SYSCTL_TIMEOUT_S)

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(room.subprocess, "run", run)
    assert read_cpu().flags is None
