"""The shapes, what each must reach, and the table. Pure: nothing here touches a GPU."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

NUM_KV_HEADS, NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 32, 128, 16
KV_BYTES = {"bf16": 2, "fp8": 1}
SCALE_BYTES = {"bf16": 0, "fp8": 4}  # a float32 for each row of K and of V
PEER_TOLERANCE = 0.03  # slower than the best peer by no more than this


@dataclass(frozen=True)
class Shape:
    """One decode: B sequences of the same length, in a cache of one kind."""

    batch: int
    length: int
    kv: str

    @property
    def name(self) -> str:
        """As in `32 x 4k fp8`."""
        return f"{self.batch} x {self.length // 1024}k {self.kv}"

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V that one call reads, scales included."""
        return 2 * self.batch * self.length * NUM_KV_HEADS * (HEAD_DIM * KV_BYTES[self.kv] + SCALE_BYTES[self.kv])


LENGTHS = ((1, 32768), (1, 131072), (32, 4096), (128, 2048), (256, 8192))
SHAPES = tuple(Shape(batch, length, kv) for kv in KV_BYTES for batch, length in LENGTHS)


def bar(shape: Shape) -> float:
    """The least fraction of the copy bandwidth, on an H200."""
    if shape.batch * shape.length <= 32768:
        return {"bf16": 0.75, "fp8": 0.65}[shape.kv]
    if shape.kv == "fp8":
        return 0.85
    return 0.93 if shape.batch == 256 else 0.90


def layers_for(shape: Shape, least_bytes: int, most_bytes: int) -> int:
    """Caches to go round, so that none is left in the GPU's own cache from the call before; at least one."""
    wanted = -(-least_bytes // shape.num_bytes)
    return max(1, min(wanted, most_bytes // shape.num_bytes))


@dataclass(frozen=True)
class Figure:
    """One shape's times in microseconds, by who ran it, and the copy bandwidth measured beside them."""

    shape: Shape
    micros: dict[str, float]
    copy_gbs: float

    @property
    def gbs(self) -> float:
        """10⁹ bytes of K and V that our kernels read in a second."""
        return self.shape.num_bytes / self.micros["kvpager"] / 1e3

    @property
    def fraction(self) -> float:
        """Of the copy bandwidth."""
        return self.gbs / self.copy_gbs

    @property
    def best_peer(self) -> str | None:
        """The quickest of the others; torch's SDPA has no pages and is none."""
        peers = [name for name in self.micros if name not in ("kvpager", "SDPA")]
        return min(peers, key=self.micros.__getitem__, default=None)

    def verdict(self) -> str:
        """`ok`, or what is missed."""
        missed = []
        if self.fraction < bar(self.shape):
            missed.append(f"below {bar(self.shape):.0%}")
        if (peer := self.best_peer) and self.micros["kvpager"] > (1 + PEER_TOLERANCE) * self.micros[peer]:
            missed.append(f"{self.micros['kvpager'] / self.micros[peer] - 1:.0%} slower than {peer}")
        return ", ".join(missed) or "ok"


def copy_gbs(num_bytes: int, seconds: float) -> float:
    """Of a copy within the device: what is read and what is written."""
    return 2 * num_bytes / seconds / 1e9


def as_table(figures: Iterable[Figure]) -> list[str]:
    """One line a shape: microseconds of everybody, GB/s, fraction, verdict."""
    figures = list(figures)
    others = list(dict.fromkeys(name for figure in figures for name in figure.micros if name != "kvpager"))
    columns = ["shape", "MB", "kvpager us", *(f"{name} us" for name in others), "GB/s", "copy GB/s", "fraction", "bar"]
    rows = [[*columns, "verdict"]]
    for figure in figures:
        times = [f"{figure.micros[name]:.1f}" if name in figure.micros else "-" for name in ("kvpager", *others)]
        rows.append(
            [
                figure.shape.name, f"{figure.shape.num_bytes / 1e6:.0f}", *times, f"{figure.gbs:.0f}",
                f"{figure.copy_gbs:.0f}", f"{figure.fraction:.1%}", f"{bar(figure.shape):.0%}", figure.verdict(),
            ]
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_json(figures: Iterable[Figure]) -> list[dict[str, object]]:
    """The same for machines, with what follows from the times."""
    return [
        {**asdict(figure), "gbs": figure.gbs, "fraction": figure.fraction, "bar": bar(figure.shape),
         "verdict": figure.verdict()}
        for figure in figures
    ]  # fmt: skip
