"""Decode as a fraction of what the machine can do at best, and its picture."""

import statistics
from pathlib import Path

from kvpager import native
from ops.decode import DTYPES, Figure, Pool, against_roofline, macs
from ops.machine import Machine


def roofline(machine: Machine, num_bytes: int, dtypes: list[str], threads: list[int], rounds: int) -> list[Figure]:
    """8 sequences over all of a pool of `num_bytes`, K = 8, D = 128, tables shuffled."""
    print(f"\nroofline: pool of {num_bytes / 1e9:g} GB, K = 8, D = 128, shuffled tables, {native.active_cpu_isa()}")
    figures = []
    for dtype in dtypes:
        for block_size in (16, 32):
            pool = Pool(dtype, block_size, num_bytes)
            lengths = [pool.num_tokens // 8 // block_size * block_size] * 8
            for group in (2, 4):
                call, read = pool.decode(lengths, group)
                for count in threads:
                    name = f"{dtype} G={group} S={block_size} T={count}"
                    work = macs(lengths, group)
                    figures.append(against_roofline(name, machine, call, read, work, count, rounds))
                    print_figure(figures[-1])
    return figures


def print_figure(figure: Figure) -> None:
    print(
        f"{figure.name:32} {figure.milliseconds:9.2f} ms {figure.gbs:6.1f} GB/s of {figure.read_gbs:5.1f}   "
        f"{figure.fraction:5.0%} ({figure.fraction_min:.0%} to {figure.fraction_max:.0%})",
        flush=True,
    )


def plot(figures: list[Figure], path: Path) -> None:
    """The roofline of the most threads, and every case of that many threads under it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    threads = max(int(figure.name.rsplit("T=", 1)[1]) for figure in figures)
    shown = [figure for figure in figures if figure.name.endswith(f"T={threads}")]
    read = statistics.median(figure.read_gbs for figure in shown)
    peak = statistics.median(figure.gmacs for figure in shown)
    x = [2 ** (-2 + step / 16) for step in range(97)]  # 1/4 to 16
    canvas, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    roof = f"the machine: {read:.0f} GB/s read, {peak:.0f} · 10⁹ float32 multiply-adds/s"
    axes.loglog(x, [min(peak, read * intensity) for intensity in x], "k", lw=1.5, label=roof)
    markers = {("2", "16"): "o", ("2", "32"): "s", ("4", "16"): "^", ("4", "32"): "D"}
    colours = dict(zip(DTYPES, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for figure in shown:
        dtype, *sizes = figure.name.split()
        group, block_size = (size.split("=")[1] for size in sizes[:2])
        y = figure.gbs * figure.macs_per_byte
        axes.plot(figure.macs_per_byte, y, markers[group, block_size], color=colours[dtype], ms=7, mfc="none", mew=1.6)
    for dtype in dict.fromkeys(figure.name.split()[0] for figure in shown):
        axes.plot([], [], "o", color=colours[dtype], label=dtype)
    for (group, block_size), marker in markers.items():
        axes.plot([], [], marker, color="k", mfc="none", mew=1.6, label=f"G = {group}, blocks of {block_size}")
    axes.set_xlabel("multiply-adds for each byte of K and V")
    axes.set_ylabel("10⁹ multiply-adds a second")
    axes.set_title(f"paged_attention, 8 sequences, K = 8, D = 128, {native.active_cpu_isa()}, {threads} threads")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(base=2, numticks=20))
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(ticker.NullLocator())
    axes.legend(loc="lower right", fontsize=9)
    axes.grid(alpha=0.3)
    canvas.savefig(path, dpi=130)
