"""The machine's read bandwidth and multiply-add peak, measured with the same threads as the kernels beside them."""

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kvpager.huge_pages import advise_huge_pages
from kvpager.ops.op import OPS

SOURCE = Path(__file__).with_name("machine.cpp")
FMA_ROUNDS = 4_000_000


def wall_seconds(call: Callable[[], object], threads: int) -> float:
    """Seconds on the clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cpu_seconds(call: Callable[[], object], threads: int) -> float:
    """Processor seconds of all threads, for each of them: what others run in between does not count."""
    start = time.process_time()
    call()
    return (time.process_time() - start) / threads


class Machine:
    """Measures; keeps a buffer as large as the pools it is compared with, in pages of the same kind."""

    def __init__(self, buffer_bytes: int, clock: Callable[[Callable[[], object], int], float] = wall_seconds) -> None:
        self.clock = clock
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise SystemExit("benches/ops.py needs a C++ compiler to measure the machine")
        self.folder = tempfile.TemporaryDirectory()
        library = Path(self.folder.name) / "machine.so"
        torch_folder = Path(torch.__file__).parent
        subprocess.run(
            [
                compiler, "-std=c++20", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC", "-w",
                "-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{torch_folder / 'include'}", str(SOURCE),
                f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-o", str(library),
            ],
            check=True,
        )  # fmt: skip
        self.ops = torch.library.Library("kvpager_bench", "DEF")
        self.ops.define("nothing" + OPS["paged_attention"].schema)
        torch.ops.load_library(library)
        self.native = ctypes.CDLL(str(library))
        self.native.machine_read.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.native.machine_fma.argtypes = (ctypes.c_int64,)
        self.buffer = torch.empty(buffer_bytes, dtype=torch.uint8)
        advise_huge_pages(self.buffer)
        self.buffer.fill_(1)

    def read_gbs(self, threads: int) -> float:
        """GB/s of one pass over the buffer, its parts read by `threads` threads at once."""
        part = self.buffer.numel() // threads // 512 * 512
        starts = [self.buffer.data_ptr() + part * index for index in range(threads)]
        return part * threads / self._seconds(threads, self.native.machine_read, [(at, part) for at in starts]) / 1e9

    def fma_gops(self, threads: int) -> float:
        """Float multiply-adds, in 10⁹ a second."""
        work = 16 * 12 * FMA_ROUNDS * threads
        return work / self._seconds(threads, self.native.machine_fma, [(FMA_ROUNDS,)] * threads) / 1e9

    def _seconds(self, threads: int, function: Callable[..., object], arguments: list[tuple[int, ...]]) -> float:
        if threads == 1:
            return self.clock(lambda: function(*arguments[0]), 1)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: time.sleep(0.001), range(threads)))  # the threads are there before the clock runs
            return self.clock(lambda: list(pool.map(lambda given: function(*given), arguments)), threads)
