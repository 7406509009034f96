"""Draws docs/overview.svg: pool, block tables, the way from a token position to its slot, and a block's life.

    python tools/draw_overview.py

The tables and the slots drawn are those of a real `KVBlockManager`, so the picture can't drift from the code.
"""

from pathlib import Path
from xml.sax.saxutils import escape

from kvpager import KVBlockManager

COLOURS = {0: "#4c78a8", 1: "#e07b39", 2: "#59a14f"}
PALE = {0: "#d5e0ed", 1: "#f8dfcf", 2: "#d8ead6"}
INK, FAINT, PAPER = "#222", "#888", "#fff"
CELL = 34


class Canvas:
    """Collects SVG elements."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="14">',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str = "none", stroke: str = INK) -> None:
        """A rectangle."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="{stroke}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 14,
        fill: str = INK,
        anchor: str = "start",
        weight: str = "normal",
    ) -> None:
        """One line of text; `anchor` says which end stands at x."""
        look = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}"'
        self.parts.append(f'<text x="{x}" y="{y}" {look}>{escape(words)}</text>')

    def arrow(self, path: str, stroke: str = INK, width: float = 1.5) -> None:
        """A path with a tip at its end."""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{width}" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """The finished document."""
        return "\n".join([*self.parts, "</svg>", ""])


def example_manager() -> KVBlockManager:
    """Three sequences of 10, 6 and 15 tokens over blocks of 4; their tables are [7, 2, 9], [4, 1], [8, 5, 3, 6]."""
    manager = KVBlockManager(10, 4)
    for _ in range(10):
        manager.allocate_block()
    for block in reversed([7, 2, 9, 4, 1, 8, 5, 3, 6, 0]):
        manager.free_block(block)
    for sequence_id, length in enumerate([10, 6, 15]):
        manager.create_sequence(sequence_id)
        manager.append_tokens(sequence_id, length)
    return manager


def draw_tables(canvas: Canvas, manager: KVBlockManager, left: float, top: float) -> None:
    """One row a sequence: its length and its block table."""
    canvas.text(left, top - 26, "block tables", size=16, weight="bold")
    canvas.text(left, top - 8, "logical block →  0, 1, 2, 3", fill=FAINT, size=12)
    for row, state in enumerate(manager.sequences.values()):
        y = top + row * 58
        canvas.text(left, y + 23, f"sequence {state.sequence_id}", fill=COLOURS[row], weight="bold")
        canvas.text(left, y + 39, f"{state.sequence_length} tokens", size=12, fill=FAINT)
        for column, block in enumerate(state.block_table):
            canvas.box(left + 100 + column * CELL, y, CELL, CELL, fill=PALE[row])
            canvas.text(left + 100 + (column + 0.5) * CELL, y + 22, str(block), anchor="middle")


def draw_pool(canvas: Canvas, manager: KVBlockManager, left: float, top: float) -> None:
    """Two columns of blocks, slot numbers in the cells; filled cells hold K and V of a token."""
    canvas.text(left, top - 26, "pool: 10 blocks of 4 slots", size=16, weight="bold")
    canvas.text(left, top - 8, "coloured: holds K and V of that position; light: not written yet", fill=FAINT, size=12)
    owner: dict[int, tuple[int, int]] = {}
    for state in manager.sequences.values():
        for position in range(state.sequence_length):
            block, offset = manager.locate(state.sequence_id, position)
            owner[block * 4 + offset] = (state.sequence_id, position)
    held = {block: state.sequence_id for state in manager.sequences.values() for block in state.block_table}
    for block in range(10):
        x, y = left + (block // 5) * 260, top + (block % 5) * 46
        canvas.text(x, y + 22, f"block {block}", size=12, fill=INK if block in held else FAINT)
        for offset in range(4):
            slot = block * 4 + offset
            pale = PALE[held[block]] if block in held else "none"
            cell_x = x + 62 + offset * CELL
            canvas.box(cell_x, y, CELL, CELL, fill=COLOURS[owner[slot][0]] if slot in owner else pale)
            if slot in owner:
                canvas.text(cell_x + CELL / 2, y + 16, str(owner[slot][1]), anchor="middle", fill=PAPER, weight="bold")
            canvas.text(
                cell_x + CELL / 2, y + 30, str(slot), anchor="middle", size=9, fill=PAPER if slot in owner else FAINT
            )


def draw_translation(canvas: Canvas, manager: KVBlockManager, left: float, top: float) -> None:
    """Token 5 of sequence 0, step by step."""
    position = 5
    block, offset = manager.locate(0, position)
    canvas.text(left, top, "from a token position to its slot", size=16, weight="bold")
    steps = [
        f"position {position} of sequence 0",
        f"logical block {position} // 4 = {position // 4},  offset {position} % 4 = {offset}",
        f"block_table[{position // 4}] = block {block}",
        f"slot = {block} · 4 + {offset} = {block * 4 + offset}",
    ]
    for i, step in enumerate(steps):
        canvas.text(left, top + 26 + i * 24, ("" if i == 0 else "→  ") + step)


def draw_life(canvas: Canvas, left: float, top: float) -> None:
    """The states of a block and what moves it between them."""
    canvas.text(left, top, "the life of a block", size=16, weight="bold")
    boxes = {"free": 0, "live, one holder": 190, "live, shared": 410}
    for name, x in boxes.items():
        canvas.box(left + x, top + 44, 130, 40)
        canvas.text(left + x + 65, top + 69, name, anchor="middle", weight="bold")
    for x, forth, back in (
        (130, "append", ["release,", "truncate"]),
        (320, "fork", ["release, truncate,", "append (copies first)"]),
    ):
        stop = x + (60 if x == 130 else 90)
        middle = left + (x + stop) / 2
        canvas.arrow(f"M{left + x} {top + 56} L{left + stop - 2} {top + 56}")
        canvas.text(middle, top + 40, forth, anchor="middle", size=12)
        canvas.arrow(f"M{left + stop} {top + 76} L{left + x + 2} {top + 76}")
        for line, words in enumerate(back):
            canvas.text(middle, top + 102 + 15 * line, words, anchor="middle", size=12)


def main() -> None:
    """Writes docs/overview.svg."""
    manager = example_manager()
    canvas = Canvas(920, 480)
    draw_tables(canvas, manager, 30, 66)
    draw_pool(canvas, manager, 350, 66)
    draw_translation(canvas, manager, 30, 340)
    draw_life(canvas, 350, 340)
    target = Path(__file__).parent.parent / "docs" / "overview.svg"
    target.write_text(canvas.svg(), encoding="utf-8")
    print(f"wrote {target.relative_to(target.parent.parent)}")


if __name__ == "__main__":
    main()
