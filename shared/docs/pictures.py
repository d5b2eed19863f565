"""Draws the pages' diagrams as SVG. Their numbers are computed from one small example, not typed.

Colours work on light and dark pages alike: text is `currentColor`, cells are tints of a mid tone under it.
"""

from __future__ import annotations

import re
from html import escape

BLOCK_SIZE, NUM_BLOCKS = 4, 8
# The example of the pages: two requests in a pool of eight blocks, fragmented and out of order.
TABLES = {"A": [5, 1, 3], "B": [6, 4]}
SEQ_LENS = {"A": 10, "B": 6}
TONES = {"A": "#2f7de1", "B": "#d9730d", "hot": "#c026d3", "new": "#15803d", "pad": "#808080", "none": "none"}
CELL, GAP = 26, 4


def locate(request: str, position: int) -> tuple[int, int]:
    """(physical block, slot in it) of a position of the example's request."""
    return TABLES[request][position // BLOCK_SIZE], position % BLOCK_SIZE


class Picture:
    """An SVG that grows by calls; coordinates in pixels. `text` holds what a screen reader reads out."""

    def __init__(self, name: str, width: int, height: int, title: str, text: str):
        self.name, self.width, self.height, self.title, self.text = name, width, height, title, text
        self.parts: list[str] = []

    def label(self, x, y, text, anchor="start", bold=False, small=False):
        style = (' font-weight="700"' if bold else "") + (' font-size="12"' if small else "")
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}"{style}>{escape(str(text))}</text>')

    def cell(self, x, y, text="", tone="none", width=CELL, height=CELL, dashed=False):
        color = TONES[tone]
        fill = "none" if tone == "none" else color
        stroke = "currentColor" if tone == "none" else color
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        faint = ' stroke-opacity=".45"' if tone == "none" else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" fill-opacity=".2" '
            f'stroke="{stroke}"{faint}{dash}/>'
        )
        if text != "":
            self.label(x + width / 2, y + height / 2 + 4.5, text, "middle")

    def row(self, x, y, texts, tones, step=CELL, width=CELL, height=CELL):
        """A row of touching cells. tones: one for all, or one for each."""
        tones = [tones] * len(texts) if isinstance(tones, str) else tones
        for i, (text, tone) in enumerate(zip(texts, tones)):
            self.cell(x + i * step, y, text, tone, width, height, dashed=tone == "pad")

    def arrow(self, x1, y1, x2, y2, tone="none", bend=0):
        """From (x1, y1) to (x2, y2); bend moves the middle of the curve up or down on the way."""
        color = "currentColor" if tone == "none" else TONES[tone]
        middle = (y1 + y2) / 2 + bend
        self.parts.append(
            f'<path d="M{x1} {y1} C{x1} {middle} {x2} {middle} {x2} {y2}" fill="none" stroke="{color}" '
            f'stroke-width="1.5" marker-end="url(#{self.name}-{tone})"/>'
        )

    def flow(self, x1, y, x2, tone="none"):
        """A straight arrow to the right or left."""
        color = "currentColor" if tone == "none" else TONES[tone]
        self.parts.append(
            f'<path d="M{x1} {y} H{x2}" fill="none" stroke="{color}" stroke-width="1.5" '
            f'marker-end="url(#{self.name}-{tone})"/>'
        )

    def pool(self, x, y, contents, names_below=False, across=4):
        """The pool's blocks in rows of `across`; contents: {(block, slot): (text, tone)}. Returns where slots are."""
        places = {}
        pitch = BLOCK_SIZE * CELL + 22
        for block in range(NUM_BLOCKS):
            left, top = x + block % across * pitch, y + block // across * (CELL + 34)
            self.label(left, top + (CELL + 14 if names_below else -5), f"block {block}", small=True)
            for slot in range(BLOCK_SIZE):
                text, tone = contents.get((block, slot), ("", "none"))
                self.cell(left + slot * CELL, top, text, tone)
                places[block, slot] = (left + slot * CELL + CELL / 2, top)
        return places

    def svg(self) -> str:
        used = sorted(set(re.findall(rf"url\(#{self.name}-(\w+)\)", "".join(self.parts))))
        markers = "".join(
            f'<marker id="{self.name}-{tone}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 Z" '
            f'fill="{"currentColor" if tone == "none" else TONES[tone]}"/></marker>'
            for tone in used
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-labelledby="{self.name}-title {self.name}-desc" font-family="inherit" font-size="14" '
            f'fill="currentColor" style="display:block;width:100%;min-width:{round(self.width * 0.85)}px;'
            f'max-width:{self.width}px;height:auto;margin:0 auto">\n'
            f'<title id="{self.name}-title">{escape(self.title)}</title>\n'
            f'<desc id="{self.name}-desc">{escape(self.text)}</desc>\n'
            f"<defs>{markers}</defs>\n{body}\n</svg>\n"
        )


def example_pool() -> dict[tuple[int, int], tuple[str, str]]:
    """Contents of the example's pool: each request's positions where they lie."""
    return {locate(r, p): (f"{r}{p}", r) for r in TABLES for p in range(SEQ_LENS[r])}


def paged_kv() -> Picture:
    """Logical positions, block tables, physical slots."""
    picture = Picture(
        "paged-kv",
        540,
        340,
        "Two requests in one pool of blocks",
        "; ".join(
            f"request {r} has {SEQ_LENS[r]} tokens, its block table is {TABLES[r]}, its positions lie in "
            + ", ".join(f"block {b}" for b in TABLES[r])
            for r in TABLES
        ),
    )
    y = 34
    picture.label(0, 16, "what a request sees: positions 0, 1, 2, …", bold=True)
    for request, table in TABLES.items():
        picture.row(20, y, [f"{request}{p}" for p in range(SEQ_LENS[request])], request)
        picture.label(0, y + 18, request, bold=True)
        picture.label(330, y + 18, "block table")
        picture.row(420, y, table, request)
        y += CELL + 12
    picture.label(0, y + 22, "where they lie: the pool", bold=True)
    contents = example_pool() | {locate("A", 9): ("A9", "hot")}
    picture.pool(0, y + 50, contents)
    picture.label(0, y + 182, "free blocks:")
    picture.row(90, y + 164, [b for b in range(NUM_BLOCKS) if all(b not in t for t in TABLES.values())], "none")
    block, slot = locate("A", 9)
    picture.label(
        0,
        y + 218,
        f"A9: 9 // {BLOCK_SIZE} = {9 // BLOCK_SIZE}, the table's entry {9 // BLOCK_SIZE} is {block}, "
        f"9 % {BLOCK_SIZE} = {slot}: block {block}, slot {slot}",
        small=True,
    )
    return picture


def contiguous() -> Picture:
    """Why blocks at all: one stretch per request, as long as it may ever get."""
    picture = Picture(
        "contiguous",
        540,
        176,
        "Reserved stretches against blocks",
        "Above: two requests reserve sixteen positions each and use ten and six of them; a third does not fit. "
        "Below: the same memory in blocks of four; the two requests hold five blocks, three are free.",
    )
    picture.label(0, 16, "one stretch per request, for the longest answer it might give", bold=True)
    step = 16.5
    for i, (request, used) in enumerate(SEQ_LENS.items()):
        for p in range(16):
            tone = request if p < used else "pad"
            picture.cell(round(i * (16 * step + 8) + p * step, 1), 28, "", tone, step, CELL, dashed=p >= used)
        picture.label(i * (16 * step + 8), 72, f"{request}: {used} of 16 used", small=True)
    picture.label(0, 106, "the same memory as eight blocks of four", bold=True)
    owners = {b: r for r, t in TABLES.items() for b in t}
    for block in range(NUM_BLOCKS):
        for slot in range(BLOCK_SIZE):
            _, tone = example_pool().get((block, slot), ("", "pad" if block in owners else "none"))
            picture.cell(
                round(block * (4 * step + 1.2) + slot * step, 1), 118, "", tone, step, CELL, dashed=tone == "pad"
            )
        picture.label(
            round(block * (4 * step + 1.2) + 2 * step, 1), 162, owners.get(block, "free"), "middle", small=True
        )
    return picture


def pairing() -> Picture:
    """pool[blocks, slots]: elementwise, and with an extra dimension every combination."""
    picture = Picture(
        "pairing",
        540,
        190,
        "Pairing and crossing of index tensors",
        "Left: blocks 3, 3, 5 and slots 0, 1, 2 name the three cells (3,0), (3,1), (5,2). "
        "Right: blocks 3 and 5 as a column and slots 0, 1, 2 name all six cells.",
    )
    for left, title, cells in (
        (0, "pool[blocks, slots]", {(3, 0), (3, 1), (5, 2)}),
        (290, "pool[blocks[:, None], slots]", {(b, s) for b in (3, 5) for s in range(3)}),
    ):
        picture.label(left, 16, title, bold=True)
        for slot in range(4):
            picture.label(left + 62 + slot * CELL + CELL / 2, 40, slot, "middle", small=True)
        for i, block in enumerate((2, 3, 4, 5)):
            picture.label(left, 64 + i * CELL, f"block {block}", small=True)
            for slot in range(4):
                hit = (block, slot) in cells
                picture.cell(left + 62 + slot * CELL, 46 + i * CELL, "✓" if hit else "", "A" if hit else "none")
    picture.label(0, 176, "blocks [3, 3, 5], slots [0, 1, 2]", small=True)
    picture.label(290, 176, "blocks [[3], [5]], slots [0, 1, 2]", small=True)
    return picture


NEW = range(6, 10)  # the positions of request A that the pictures of steps 01 and 02 write


def naive_write() -> Picture:
    """One trip through the loop for each token."""
    picture = Picture(
        "naive_write",
        540,
        240,
        "A loop writes token by token",
        "Four new tokens of request A, positions 6 to 9, go to their slots in four separate trips: "
        + ", ".join(f"position {p} to block {locate('A', p)[0]} slot {locate('A', p)[1]}" for p in NEW),
    )
    picture.label(0, 16, "k, v of 4 new tokens, start_pos = 6", bold=True)
    for i, p in enumerate(NEW):
        picture.cell(20 + i * 130, 30, f"A{p}", "new", 44)
        picture.label(70 + i * 130, 48, f"trip {i + 1}", small=True)
    contents = {c: v for c, v in example_pool().items() if v[0] not in {f"A{p}" for p in NEW}}
    contents |= {locate("A", p): (f"A{p}", "new") for p in NEW}
    places = picture.pool(0, 130, contents, names_below=True)
    for i, p in enumerate(NEW):
        x, top = places[locate("A", p)]
        picture.arrow(42 + i * 130, 58, x, top - 3, "new", bend=-12)
    return picture


def vectorized_write() -> Picture:
    """The slots of all tokens as two tensors, then one write."""
    picture = Picture(
        "vectorized_write",
        540,
        330,
        "All slots are computed, then one write",
        f"positions {list(NEW)} give blocks {[locate('A', p)[0] for p in NEW]} and slots "
        f"{[locate('A', p)[1] for p in NEW]}; one operation writes all four tokens to them.",
    )
    rows = [
        ("positions", list(NEW), "none"),
        (f"positions // {BLOCK_SIZE}", [p // BLOCK_SIZE for p in NEW], "none"),
        ("blocks = table[…]", [locate("A", p)[0] for p in NEW], "A"),
        (f"slots = positions % {BLOCK_SIZE}", [locate("A", p)[1] for p in NEW], "A"),
        ("k", [f"A{p}" for p in NEW], "new"),
    ]
    for i, (name, values, tone) in enumerate(rows):
        picture.label(0, 20 + i * 32, name)
        picture.row(170, 2 + i * 32, values, tone, step=36, width=36)
    picture.label(350, 52, "block table of A")
    picture.row(350, 62, TABLES["A"], "A")
    contents = {c: v for c, v in example_pool().items() if v[0] not in {f"A{p}" for p in NEW}}
    contents |= {locate("A", p): (f"A{p}", "new") for p in NEW}
    picture.label(330, 184, "pool[blocks, slots] = k", bold=True)
    places = picture.pool(0, 220, contents, names_below=True)
    for p in NEW:
        x, top = places[locate("A", p)]
        picture.arrow(242, 160, x, top - 3, "new")
    return picture


def dense_rows(picture: Picture, x: int, y: int) -> dict[tuple[str, int], tuple[float, float]]:
    """The left-padded dense tensor of the example; returns where each request's columns are."""
    longest, places = max(SEQ_LENS.values()), {}
    for row, (request, seq_len) in enumerate(SEQ_LENS.items()):
        top = y + row * (CELL + 8)
        picture.label(x - 18, top + 18, request, bold=True)
        for column in range(longest):
            p = column - (longest - seq_len)
            tone = request if p >= 0 else "pad"
            picture.cell(x + column * CELL, top, f"{request}{p}" if p >= 0 else "0", tone, dashed=p < 0)
            places[request, column] = (x + column * CELL + CELL / 2, top)
    return places


def naive_gather() -> Picture:
    """Every token of every history walks into the dense tensor alone."""
    picture = Picture(
        "naive_gather",
        540,
        310,
        "The loop copies every history token by token",
        "The pool's blocks above; below the dense tensor with one row per request, request B padded on the left with "
        "four zeros. Each token is copied by its own assignment.",
    )
    places = picture.pool(0, 24, example_pool())
    picture.label(0, 196, "for every layer, every request, every position: one copy of k and one of v", small=True)
    dense = dense_rows(picture, 140, 220)
    picture.label(0, 254, "k [B, S, K, D]", small=True)
    for request, position in (("A", 0), ("A", 9), ("B", 0), ("B", 5)):
        x, top = places[locate(request, position)]
        column = position + max(SEQ_LENS.values()) - SEQ_LENS[request]
        x2, y2 = dense[request, column]
        picture.arrow(x, top + CELL, x2, y2 - 3, request)
    picture.label(20, 304, "left padding: the newest token of every request is in the last column", small=True)
    return picture


def vectorized_gather() -> Picture:
    """Positions, blocks and slots of the whole batch as matrices."""
    longest = max(SEQ_LENS.values())
    names = list(TABLES)
    logical = {r: [c - (longest - SEQ_LENS[r]) for c in range(longest)] for r in names}
    clamped = {r: [max(p, 0) for p in logical[r]] for r in names}
    picture = Picture(
        "vectorized_gather",
        540,
        372,
        "Index matrices for the whole batch",
        "For requests A and B: the position behind every column of the dense tensor, negative in the padding; "
        "clamped to 0; from it the block through the table and the slot; one indexing per pool reads all of it; "
        "the padding is then set to zero.",
    )
    rows = [
        ("positions", logical),
        ("clamp(min=0)", clamped),
        ("blocks", {r: [locate(r, p)[0] for p in clamped[r]] for r in names}),
        ("slots", {r: [locate(r, p)[1] for p in clamped[r]] for r in names}),
    ]
    for i, (name, values) in enumerate(rows):
        y = 4 + i * 66
        picture.label(0, y + 30, name, bold=i >= 2)
        for j, r in enumerate(names):
            picture.label(128, y + 18 + j * (CELL + 2), r, small=True)
            tones = [r if p >= 0 else "pad" for p in logical[r]]
            picture.row(146, y + j * (CELL + 2), values[r], tones)
    picture.label(422, 156, "one indexing:")
    picture.label(422, 176, "pool[blocks, slots]", small=True)
    picture.label(422, 200, "then padding → 0", small=True)
    picture.arrow(470, 208, 420, 306, "none")
    picture.label(0, 322, "k [B, S, K, D]", bold=True)
    dense_rows(picture, 146, 276)
    picture.label(
        0, 366, "dashed: padding reads the request's own first slot, so that every index is a real one", small=True
    )
    return picture


def dynamic_cache() -> Picture:
    """Where the history is copied in one decode step of step 05."""
    picture = Picture(
        "dynamic_cache",
        540,
        226,
        "Three copies of the history in one decode step",
        "The pool is gathered into dense tensors (first copy); update copies these into the DynamicCache (second "
        "copy); the attention's update concatenates history and new token (third copy). The new token is read back out "
        "of our own cache object and written to the pool.",
    )
    boxes = [(0, "pool", "blocks", "A"), (146, "gather", "dense k, v", "A"), (292, "DynamicCache", "ours", "B")]
    boxes.append((438, "attention", "history + new", "new"))
    for x, name, what, tone in boxes:
        picture.cell(x, 60, "", tone, 100, 56)
        picture.label(x + 50, 84, name, "middle", bold=True, small=True)
        picture.label(x + 50, 104, what, "middle", small=True)
    for i, (x, name) in enumerate(((100, "index"), (246, "update"), (392, "update: cat"))):
        picture.flow(x + 4, 88, x + 42, "none")
        picture.label(x + 23, 28, f"copy {i + 1}", "middle", bold=True, small=True)
        picture.label(x + 23, 46, name, "middle", small=True)
    picture.arrow(342, 122, 50, 122, "new", bend=80)
    picture.label(196, 206, "only the new token goes back: dense[layer][:, :, -1:]", "middle", small=True)
    return picture


def padding() -> Picture:
    """Mask and position ids of a left-padded batch."""
    longest = max(SEQ_LENS.values())
    picture = Picture(
        "padding",
        540,
        236,
        "Left padding, mask and position ids",
        "Row A has ten cached tokens, row B six and four cells of padding before them; the new token stands in the "
        "last column of both. The mask is 0 in the padding. The new token's position id is 10 in row A and 6 in row B, "
        "although it stands in column 10 in both.",
    )
    picture.label(0, 16, "keys: history and new token", bold=True)
    for row, r in enumerate(SEQ_LENS):
        y = 28 + row * (CELL + 6)
        pad = longest - SEQ_LENS[r]
        texts = ["0"] * pad + [f"{r}{p}" for p in range(SEQ_LENS[r])]
        picture.row(20, y, texts, ["pad"] * pad + [r] * SEQ_LENS[r], step=30, width=30)
        picture.cell(20 + longest * 30, y, f"{r}{SEQ_LENS[r]}", "new", 30)
        picture.label(0, y + 18, r, bold=True)
        picture.label(364, y + 18, f"position_ids = {SEQ_LENS[r]}")
        y += 112
        picture.row(20, y, [0] * pad + [1] * (SEQ_LENS[r] + 1), ["pad"] * pad + [r] * SEQ_LENS[r] + ["new"], 30, 30)
        picture.label(0, y + 18, r, bold=True)
    picture.label(0, 128, "attention_mask", bold=True)
    picture.label(
        20, 222, "green: this step's token, in the last column of both rows, at different positions", small=True
    )
    return picture


def flat(request: str, position: int) -> int:
    """Flat slot id of a position of the example's request."""
    block, slot = locate(request, position)
    return block * BLOCK_SIZE + slot


def slot_mapping() -> Picture:
    """One number per slot; the step's writes and reads as index tensors shared by all layers."""
    longest, zero = max(SEQ_LENS.values()) + 1, NUM_BLOCKS * BLOCK_SIZE
    slots = {
        r: [zero] * (longest - n - 1) + [flat(r, p) for p in range(n + 1)] for r, n in SEQ_LENS.items()
    }  # the new token included
    new = {r: flat(r, n) for r, n in SEQ_LENS.items()}
    picture = Picture(
        "slot_mapping",
        540,
        336,
        "Flat slot ids, computed once per step",
        f"The slots of the pool are numbered through; a further block, slots {zero} and on, is always zero. The slot "
        f"mapping of the two new tokens: {list(new.values())}. Slots to read: "
        + "; ".join(f"{r}: {ids}" for r, ids in slots.items()),
    )
    contents = {c: (str(c[0] * BLOCK_SIZE + c[1]), tone) for c, (_, tone) in example_pool().items()}
    contents |= {locate(r, n): (str(new[r]), "new") for r, n in SEQ_LENS.items()}
    picture.pool(0, 20, contents)
    picture.row(0, 146, [zero, zero + 1, zero + 2, zero + 3], "pad")
    picture.label(116, 164, "one block more, never given out, always zero", small=True)
    picture.label(0, 210, "slot_mapping", bold=True)
    picture.row(120, 192, list(new.values()), "new", step=36, width=36)
    picture.label(206, 210, "one write for all requests", small=True)
    picture.label(0, 262, "slots", bold=True)
    picture.label(0, 282, "[B, S + T]", small=True)
    for j, (r, ids) in enumerate(slots.items()):
        tones = ["pad"] * (longest - SEQ_LENS[r] - 1) + [r] * SEQ_LENS[r] + ["new"]
        picture.label(102, 258 + j * 30, r, bold=True)
        picture.row(120, 240 + j * 30, ids, tones, step=36, width=36)
    picture.label(120, 326, "one read for all requests; padding reads the zero block", small=True)
    return picture


def block_attention() -> Picture:
    """Attention goes through the blocks in table order and keeps three running values."""
    picture = Picture(
        "block_attention",
        540,
        318,
        "Attention reads the blocks where they lie",
        "Request A's query meets the keys of blocks 5, 1 and 3 in this order. After each block three values are kept: "
        "the largest score, the sum of the weights and the weighted sum of the values. The last block holds two tokens "
        "of A; what stands behind them is not read. At the end the weighted sum is divided by the sum of weights.",
    )
    picture.label(0, 18, "the pool", bold=True)
    picture.pool(0, 42, {c: v for c, v in example_pool().items() if v[1] == "A"}, names_below=True)
    picture.label(0, 184, "q of A", bold=True)
    picture.cell(56, 166, "q", "new", 44)
    x = 118
    for i, block in enumerate(TABLES["A"]):
        tokens = min(BLOCK_SIZE, SEQ_LENS["A"] - i * BLOCK_SIZE)
        picture.cell(x, 166, f"block {block}", "A", 92)
        picture.label(x + 46, 208, f"{tokens} tokens", "middle", small=True)
        picture.flow(x - 16, 179, x - 3, "none")
        picture.cell(x, 222, "max, Σ, Σ·v", "none", 92)
        picture.arrow(x + 46, 212, x + 46, 220, "none")
        if i:
            picture.flow(x - 16, 235, x - 3, "none")
        x += 110
    picture.flow(x - 16, 235, x + 4, "none")
    picture.cell(x + 8, 222, "Σ·v / Σ", "new", 76)
    picture.label(0, 238, "kept so far", bold=True)
    picture.label(0, 282, "Nothing is copied: each key and each value is read once, in its place.", small=True)
    picture.label(
        0, 304, "A larger maximum makes the old sums smaller by the same factor (online softmax).", small=True
    )
    return picture


def moved() -> Picture:
    """What moves in memory in one decode step, for one history of K and V."""
    picture = Picture(
        "moved",
        540,
        206,
        "How often a history moves in one decode step",
        "Each bar is one pass over the whole history. Step 04: read the pool, write the dense tensor, then read and "
        "write it to append, then read it in attention: five. Step 05: seven. Step 06: three. Step 07: one.",
    )
    passes = [
        ("04", ["read", "write", "read", "write", "read"]),
        ("05", ["read", "write", "read", "write", "read", "write", "read"]),
        ("06", ["read", "write", "read"]),
        ("07", ["read"]),
    ]
    for i, (number, bars) in enumerate(passes):
        y = 10 + i * 42
        picture.label(0, y + 18, f"step {number}", bold=True)
        for j, bar in enumerate(bars):
            picture.cell(70 + j * 66, y, bar, "B" if bar == "write" else "A", 60)
    picture.label(70, 192, "the last read of each row is attention itself", small=True)
    return picture


def thin_matmul() -> Picture:
    """A thin product: few rows against a whole weight matrix, whose rows pass by once."""
    picture = Picture(
        "thin_matmul",
        540,
        250,
        "Every weight is read once, for all rows",
        "Left: the inputs of eight requests, eight rows. Right: a weight matrix with a row for each output feature. "
        "One row of the weight is loaded and multiplied with all eight inputs before the next is loaded.",
    )
    picture.label(0, 18, "x [rows, in]", bold=True)
    for i in range(8):
        picture.row(0, 30 + i * 20, [""] * 6, "new", step=22, width=22, height=18)
    picture.label(172, 114, "×", "middle", bold=True)
    picture.label(200, 18, "weight [out, in]", bold=True)
    for i in range(8):
        picture.row(200, 30 + i * 20, [""] * 6, "hot" if i == 2 else "A", step=22, width=22, height=18)
    picture.flow(338, 79, 368, "hot")
    picture.label(376, 18, "y [rows, out]", bold=True)
    for i in range(8):
        picture.row(376, 30 + i * 20, [""] * 8, ["none"] * 2 + ["hot"] + ["none"] * 5, step=19, width=19, height=18)
    picture.label(
        0, 216, "The row of weights in pink is loaded from memory once and serves all eight rows of x:", small=True
    )
    picture.label(0, 236, "it gives one column of y. The weights are large, x and y stay in the cache.", small=True)
    return picture


PICTURES = (
    paged_kv,
    contiguous,
    pairing,
    naive_write,
    vectorized_write,
    naive_gather,
    vectorized_gather,
    dynamic_cache,
    padding,
    slot_mapping,
    block_attention,
    moved,
    thin_matmul,
)


def render() -> dict[str, str]:
    """The pictures, by path under docs/generated."""
    return {f"pictures/{picture.name}.svg": picture.svg() for picture in (draw() for draw in PICTURES)}
