"""Published rates, bandwidths and latencies of GPUs, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Chip:
    """Published figures of a GPU.

    Attributes
    ----------
    clock_mhz : boost clock
    memory_gb_s, link_gb_s : peak of its memory, and of PCIe in one direction
    tensor_tflops : fp16 products, dense, float32 sums
    products_per_clock : multiply-adds of fp16 per clock and SM that `mma.sync` reaches
    warps, blocks, shared_bytes : at most, per SM
    reserved_bytes : of shared memory that the system takes from each block
    lanes_per_clock : results per clock and SM, by pipe
    memory_clocks, cache_clocks : latency of a load that misses all caches, or hits L2
    sources : of these numbers, by attribute
    """

    name: str
    sm_count: int
    clock_mhz: float
    memory_gb_s: float
    link_gb_s: float
    tensor_tflops: float
    products_per_clock: float
    warps: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int
    lanes_per_clock: Mapping[str, float]
    memory_clocks: float
    cache_clocks: float
    sources: Mapping[str, str]


def _chip(
    name: str, board: str, *, sms: tuple[int, float], memory: float, link: float,
    tensor: tuple[float, float], residency: tuple[int, int, int], fma: int, half: int,
    latency: tuple[float, float], add: int = 64, fp64: int = 2,
    products: str = "tensor_tflops / (2 x SMs x clock)", clocks: str = LATENCY,
) -> Chip:  # fmt: skip
    warps, blocks, shared_kib = residency
    return Chip(
        name, *sms, memory, link, *tensor, warps, blocks, shared_kib << 10,
        0 if shared_kib == 64 else 1024,
        {"fma": fma, "imad": 64, "half": half, "alu": 64, "add": add, "xu": 16, "fp64": fp64},
        *latency,
        {
            "sm_count, clock_mhz, memory_gb_s, tensor_tflops": board, "link_gb_s": LINK,
            "products_per_clock": products,
            "warps, blocks, shared_bytes, reserved_bytes": OCCUPANCY, "lanes_per_clock": GUIDE,
            "memory_clocks, cache_clocks": clocks,
        },
    )  # fmt: skip


_LIKE_ADA = f"assumed as on the RTX 4090 of {LATENCY}"
CHIPS: dict[str, Chip] = {
    "sm_75": _chip(
        "T4", "NVIDIA T4 datasheet and Turing whitepaper", sms=(40, 1590), memory=320, link=15.75,
        tensor=(65, 512), residency=(32, 16, 64), fma=64, half=64, latency=(500, 188),
        clocks="L2: Jia et al., arXiv:1903.07486; memory: assumed, of the order of newer chips",
    ),
    "sm_80": _chip(
        "A100 SXM 80 GB", "NVIDIA A100 datasheet and whitepaper", sms=(108, 1410), memory=2039,
        link=31.5, tensor=(312, 1024), residency=(64, 32, 164), fma=64, half=128, fp64=32,
        latency=(466, 261),
    ),
    "sm_86": _chip(
        "A10", "NVIDIA A10 datasheet, GA102 whitepaper", sms=(72, 1695), memory=600, link=31.5,
        tensor=(125, 512), residency=(48, 16, 100), fma=128, half=64, latency=(541, 273),
        clocks=_LIKE_ADA,
    ),
    "sm_89": _chip(
        "L40S", "NVIDIA L40S datasheet, Ada whitepaper", sms=(142, 2520), memory=864, link=31.5,
        tensor=(362, 512), residency=(48, 24, 100), fma=128, half=64, latency=(541, 273),
        clocks=_LIKE_ADA,
    ),
    "sm_90": _chip(
        "H100 SXM", "NVIDIA H100 datasheet and whitepaper; clock: the driver's maximum",
        sms=(132, 1980), memory=3350, link=63, tensor=(989, 1290), residency=(64, 32, 228),
        fma=128, half=128, fp64=64, latency=(479, 263),
        products="2048 with wgmma; of those mma.sync reaches 63 %: Luo et al., arXiv:2402.13499",
    ),
    "sm_100": _chip(
        "B200", "NVIDIA DGX B200 and Blackwell technical brief; 148 SMs and clock: TechPowerUp",
        sms=(148, 1965), memory=8000, link=63, tensor=(2250, 1290), residency=(64, 32, 228),
        fma=128, half=64, fp64=64, latency=(600, 300),
        products="assumed as on sm_90: what is published is of tcgen05, not of mma.sync",
        clocks="assumed: none is published for plain loads; larger than on sm_90, as there are two "
        "dies",
    ),
    "sm_120": _chip(
        "RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell datasheet, RTX Blackwell whitepaper",
        sms=(188, 2617), memory=1792, link=63, tensor=(504, 512), residency=(48, 24, 100), fma=128,
        half=64, add=128, latency=(541, 273), clocks=_LIKE_ADA,
    ),
}  # fmt: skip
"""A chip by architecture."""


@dataclass(frozen=True)
class Board:
    """A board with the SMs of the chip of `arch`, and another memory or clock."""

    arch: str
    memory_gb_s: float
    clock_mhz: int
    source: str


# With wgmma, an SM computes 2048 multiply-adds of fp16 per clock.
_H100 = CHIPS["sm_90"]
_DENSE_PEAK_MHZ = round(_H100.tensor_tflops * 1e6 / (_H100.sm_count * 2 * 2048))
_DENSE_PEAK = "clock at which the SMs reach the datasheet's dense fp16 peak"

BOARDS = {
    "H200 SXM": Board("sm_90", 4800, _DENSE_PEAK_MHZ, f"NVIDIA H200 datasheet; {_DENSE_PEAK}"),
    "H100 SXM, lower clock": Board(
        "sm_90", _H100.memory_gb_s, _DENSE_PEAK_MHZ, f"NVIDIA H100 datasheet; {_DENSE_PEAK}"
    ),
}
"""Boards that the rows of a chip are converted to, by name."""

DEFAULT_ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
