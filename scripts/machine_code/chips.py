"""Published rates, bandwidths and latencies of GPUs, each with its source, and what was fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

GUIDE = (
    "CUDA C++ Programming Guide 12.6, table of native arithmetic instructions; from 12.0 on CUDA "
    "C++ Best Practices Guide 13.4, 12.1.1"
)
OCCUPANCY = "CUDA C++ Programming Guide, technical specifications per compute capability"
LATENCY = "Luo et al., arXiv:2402.13499 and 2501.12084: pointer chase, A100, RTX 4090, H100 PCIe"
NSIGHT = "Nsight Compute documentation, pipelines"
LINK = "PCI Express base specifications 3.0, 4.0, 5.0: 16 lanes, one direction, less encoding"
RATES = {
    "issue": "four schedulers per SM, one instruction each per clock: Programming Guide, "
    "compute capabilities 7.x to 12.x",
    "fma, half, alu, add, xu, fp64": GUIDE,
    "imad": f"{GUIDE}; it shares the FMA pipe: {NSIGHT}",
    "shuffle": f"{GUIDE}: 32 results",
    "F2FP as alu": f"{NSIGHT}: fast conversions are on the ALU from 8.x on; assumed for 7.5",
    "local memory": "128 bytes per clock and SM from L1 and shared memory: NVIDIA Volta and Ampere "
    "whitepapers; assumed for 10.0 and 12.0, of which none is published",
    "uniform, control": "assumed to take an issue slot only: no rate is published",
}
"""Where the rates per clock come from."""

LINK_LATENCY_NS = 1300.0
"""Round trip of a load from pinned memory: SGLang pull request 40278 measured about 1.3 us."""

# --- What an H100 was fitted to -------------------------------------------------------------------

LOAD_CLOCK = 0.886
"""Clock under load, as a share of the maximum: fitted, 1,755 of an H100's 1,980 MHz. The A100 holds
its boost clock; it is assumed of the others that they lose as much as the H100."""

READ_SHARE, WRITE_SHARE = 0.9, 0.73
"""Share of the memory's published bandwidth that reads and writes reach: reads fitted to the
fastest decode; writes so that a copy reaches the 2,703 GB/s that were measured."""

LAUNCH_US, START_US = 1.0, 1.0
"""From a kernel of a graph to the next one, and what each takes before and behind its code."""

SCHEDULE_US = 6.3
"""`attention_schedule`, measured: 5 to 10 us. `PagedKVCache` launches it once a step."""


@dataclass(frozen=True)
class Chip:
    """Published figures of a GPU.

    Attributes
    ----------
    arch : whose machine code it runs
    clock_mhz, load_mhz : boost clock; the one that the model assumes under load
    memory_gb_s, link_gb_s : peak of its memory, and of PCIe in one direction
    tensor_tflops : fp16 products, dense, float32 sums
    products_per_clock : multiply-adds of fp16 per clock and SM that `mma.sync` reaches
    warps, blocks, shared_bytes : at most, per SM
    reserved_bytes : of shared memory that the system takes from each block
    lanes_per_clock : results per clock and SM, by pipe
    l2_bytes_per_clock : that all SMs together read from L2
    memory_clocks, cache_clocks : latency of a load that misses all caches, or hits L2
    sources : of these numbers, by attribute
    """

    name: str
    arch: str
    sm_count: int
    clock_mhz: float
    load_mhz: float
    memory_gb_s: float
    link_gb_s: float
    tensor_tflops: float
    products_per_clock: float
    warps: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int
    lanes_per_clock: Mapping[str, float]
    l2_bytes_per_clock: float
    memory_clocks: float
    cache_clocks: float
    sources: Mapping[str, str]


_L2 = "NVIDIA A100 whitepaper: 5,120 bytes per clock"


def _chip(
    name: str, arch: str, board: str, *, sms: tuple[int, float], memory: float, link: float,
    tensor: tuple[float, float], residency: tuple[int, int, int], fma: int, half: int,
    latency: tuple[float, float], l2: tuple[float, str], add: int = 64, fp64: int = 2, xu: int = 16,
    load_clock: float = LOAD_CLOCK, products: str = "tensor_tflops / (2 x SMs x clock)",
    clocks: str = LATENCY, rates: str = GUIDE,
) -> Chip:  # fmt: skip
    warps, blocks, shared_kib = residency
    return Chip(
        name, arch, *sms, round(sms[1] * load_clock), memory, link, *tensor, warps, blocks,
        shared_kib << 10, 0 if shared_kib == 64 else 1024,
        {"fma": fma, "imad": 64, "half": half, "alu": 64, "add": add, "xu": xu, "fp64": fp64},
        l2[0], *latency,
        {
            "arch, sm_count, clock_mhz, memory_gb_s, tensor_tflops": board, "link_gb_s": LINK,
            "load_mhz": f"{load_clock} of the boost clock", "products_per_clock": products,
            "warps, blocks, shared_bytes, reserved_bytes": OCCUPANCY, "lanes_per_clock": rates,
            "l2_bytes_per_clock": l2[1], "memory_clocks, cache_clocks": clocks,
        },
    )  # fmt: skip


_LIKE_ADA = f"assumed as on the RTX 4090 of {LATENCY}"
_SMALL_L2 = (2048, "assumed, of the order that is measured on an RTX 4090")
_BLACKWELL: dict[str, Any] = {
    "memory": 8000, "link": 63, "tensor": (2250, 1290), "residency": (64, 32, 228), "fma": 128,
    "half": 64, "latency": (600, 300),
    "l2": (10240, f"assumed, two dies of what the {_L2.removeprefix('NVIDIA ')}"),
    "products": "assumed as on sm_90: what is published is of tcgen05, not of mma.sync",
    "clocks": "assumed: none is published for plain loads; larger than on sm_90, as there are two "
    "dies",
}  # fmt: skip
_H100 = _chip(
    "H100 SXM", "sm_90", "NVIDIA H100 datasheet and whitepaper; clock: the driver's maximum",
    sms=(132, 1980), memory=3350, link=63, tensor=(989, 1290), residency=(64, 32, 228), fma=128,
    half=128, fp64=64, latency=(479, 263), l2=(5120, f"assumed as of the A100: {_L2}"),
    products="2048 with wgmma; of those mma.sync reaches 63 %: Luo et al., arXiv:2402.13499",
)  # fmt: skip
_SOURCES = "arch, sm_count, clock_mhz, memory_gb_s, tensor_tflops"

CHIPS: dict[str, Chip] = {
    "T4": _chip(
        "T4", "sm_75", "NVIDIA T4 datasheet and Turing whitepaper", sms=(40, 1590), memory=320,
        link=15.75, tensor=(65, 512), residency=(32, 16, 64), fma=64, half=64, latency=(500, 188),
        l2=_SMALL_L2,
        clocks="L2: Jia et al., arXiv:1903.07486; memory: assumed, of the order of newer chips",
    ),
    "A100": _chip(
        "A100 SXM 80 GB", "sm_80", "NVIDIA A100 datasheet and whitepaper", sms=(108, 1410),
        memory=2039, link=31.5, tensor=(312, 1024), residency=(64, 32, 164), fma=64, half=128,
        fp64=32, latency=(466, 261), l2=(5120, _L2), load_clock=1.0,
    ),
    "A10": _chip(
        "A10", "sm_86", "NVIDIA A10 datasheet, GA102 whitepaper", sms=(72, 1695), memory=600,
        link=31.5, tensor=(125, 512), residency=(48, 16, 100), fma=128, half=64, latency=(541, 273),
        l2=_SMALL_L2, clocks=_LIKE_ADA,
    ),
    "L40S": _chip(
        "L40S", "sm_89", "NVIDIA L40S datasheet, Ada whitepaper", sms=(142, 2520), memory=864,
        link=31.5, tensor=(362, 512), residency=(48, 24, 100), fma=128, half=64, latency=(541, 273),
        l2=_SMALL_L2, clocks=_LIKE_ADA,
    ),
    "H100": _H100,
    "H200": replace(
        _H100, name="H200 SXM", memory_gb_s=4800,
        sources={**_H100.sources, _SOURCES: "NVIDIA H200 datasheet: an H100 with faster memory"},
    ),
    "B200": _chip(
        "B200", "sm_100",
        "NVIDIA DGX B200 and Blackwell technical brief; 148 SMs and clock: TechPowerUp",
        sms=(148, 1965), fp64=64, **_BLACKWELL,
    ),
    "B300": _chip(
        "B300", "sm_100",
        "NVIDIA HGX B300 datasheet; SMs and clock: assumed as of the B200, as the dense fp16 peak "
        "is; sm_103 runs the code of sm_100",
        sms=(148, 1965), fp64=2, xu=32,
        rates=f"{GUIDE}; twice the exponentials: NVIDIA, Inside NVIDIA Blackwell Ultra",
        **_BLACKWELL,
    ),
    "RTX PRO 6000": _chip(
        "RTX PRO 6000", "sm_120",
        "NVIDIA RTX PRO 6000 Blackwell datasheet, RTX Blackwell whitepaper", sms=(188, 2617),
        memory=1792, link=63, tensor=(504, 512), residency=(48, 24, 100), fma=128, half=64, add=128,
        latency=(541, 273), l2=_SMALL_L2, clocks=_LIKE_ADA,
    ),
}  # fmt: skip
"""Chips by a short name."""

DEFAULT_CHIPS = ("A100", "H100", "H200", "B200", "B300", "RTX PRO 6000")
