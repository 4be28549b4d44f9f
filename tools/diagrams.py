#!/usr/bin/env python3
"""Draws the pictures of the documentation, docs/pictures/*.svg.

    tools/diagrams.py            # writes them
    tools/diagrams.py --check    # fails if a file differs from what this script draws

A picture is at most 640 units wide and its text at least 15 units high, so it can be read on a telephone. Colours stand
in one style sheet, which follows the reader's light or dark mode; every picture has its own background.
"""
import html
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH = 640
STYLE = """
  .paper { fill: #ffffff } .text { fill: #1f2328 } .muted { fill: #59636e }
  .box { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1.5 } .inner { fill: #ffffff; stroke: #8c959f }
  .line { fill: none; stroke: #59636e; stroke-width: 2 } .faint { fill: none; stroke: #b4bcc4; stroke-width: 1.5 }
  .c0 { fill: #4f8fe6 } .c1 { fill: #e08a2c } .c2 { fill: #3fa36b } .c3 { fill: #b565c9 }
  .l0 { stroke: #4f8fe6 } .l1 { stroke: #e08a2c } .l2 { stroke: #3fa36b } .l3 { stroke: #b565c9 }
  .l0, .l1, .l2, .l3 { fill: none; stroke-width: 2 } .head { fill: #59636e } .on { fill: #ffffff }
  text { font-family: system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; font-size: 18px }
  .small { font-size: 17px } .bold { font-weight: 600 } .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 15px }
  .middle { text-anchor: middle } .end { text-anchor: end }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117 } .text { fill: #e6edf3 } .muted { fill: #9198a1 } .on { fill: #0d1117 }
    .box { fill: #161b22; stroke: #656c76 } .inner { fill: #0d1117; stroke: #656c76 }
    .line { stroke: #9198a1 } .faint { stroke: #3d444d } .head { fill: #9198a1 }
    .c0 { fill: #6ea8ff } .c1 { fill: #f0a04b } .c2 { fill: #56c289 } .c3 { fill: #cf8be0 }
    .l0 { stroke: #6ea8ff } .l1 { stroke: #f0a04b } .l2 { stroke: #56c289 } .l3 { stroke: #cf8be0 }
  }
"""


class Picture:
    """Collects shapes; `title` is what a screen reader says."""

    def __init__(self, height, title):
        self.height, self.title, self.parts = height, title, []

    def rect(self, x, y, width, height, kind="box", radius=6):
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>')

    def text(self, x, y, words, kind="text"):
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}">{html.escape(words, quote=False)}</text>')

    def line(self, x1, y1, x2, y2, kind="line", arrow=True):
        self.path(f"M{x1} {y1} L{x2} {y2}", kind, arrow)

    def curve(self, x1, y1, x2, y2, kind, arrow=False):
        """Leaves and arrives horizontally."""
        bend = (x1 + x2) / 2
        self.path(f"M{x1} {y1} C{bend:g} {y1} {bend:g} {y2} {x2} {y2}", kind, arrow)

    def path(self, path, kind, arrow):
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(f'<path class="{kind}" d="{path}"{head}/>')

    def svg(self):
        words = html.escape(self.title)
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img" aria-label="{words}">',
            f"<title>{words}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'markerUnits="userSpaceOnUse" orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            f'<rect class="paper" width="{WIDTH}" height="{self.height}" rx="8"/>',
            *self.parts,
            "</svg>\n",
        ])


def overview():
    """Tokens of three ranks, one of which has none, at six experts and back."""
    routes = {(0, 0): (0, 3), (0, 1): (1, 4), (0, 2): (0, 1), (2, 0): (1, 5), (2, 1): (3, 5)}  # (rank, token): experts
    p = Picture(432, "Tokens of three ranks travel to the ranks of their experts and come back to where they were")
    lane, top = 116, 62
    for x, words in ((96, "tokens"), (330, "experts"), (566, "results")):
        p.text(x, 26, words, "text bold middle")
    p.text(208, 48, "dispatch", "muted middle")
    p.text(452, 48, "combine", "muted middle")
    rows = {e: [key for rank in range(3) for key in sorted(routes) if key[0] == rank and e in routes[key]] for e in range(6)}
    shapes = []
    for rank in range(3):
        y = top + rank * lane
        p.rect(8, y, 624, lane - 12, "box")
        p.text(18, y + 24, f"rank {rank}", "muted small")
        for local in range(2):
            p.rect(266, y + 8 + 45 * local, 128, 42, "inner", 4)
            p.text(274, y + 35 + 45 * local, f"E{2 * rank + local}", "text small")
        if all(key[0] != rank for key in routes):
            p.text(96, y + 60, "no tokens", "muted small middle")
            p.text(566, y + 60, "no tokens", "muted small middle")
    for (rank, token), experts in sorted(routes.items()):
        ty = top + rank * lane + 12 + 30 * token
        shapes += [(86, ty, rank), (556, ty, rank)]
        for expert in experts:
            ex, ey = 306 + 28 * rows[expert].index((rank, token)), top + (expert // 2) * lane + 20 + 45 * (expert % 2)
            p.curve(106, ty + 10, 266, ey + 9, f"l{rank}")
            p.curve(394, ey + 9, 556, ty + 10, f"l{rank}")
            shapes.append((ex, ey, rank))
    for x, y, rank in sorted(set(shapes)):
        p.rect(x, y, 20, 20 if x in (86, 556) else 18, f"c{rank}", 3)
    p.text(320, 422, "Each result is the weighted sum of its experts' rows, in a fixed order", "muted small middle")
    return p


def five_steps():
    """What each step takes and gives."""
    steps = (
        ("decide", "router.route", "x [T, D]", "expert ids, weights [T, K]", 0),
        ("count", "dispatcher.plan", "ids, weights [T, K]", "who sends how many rows where", 1),
        ("dispatch", "dispatcher.dispatch", "x [T, D]", "rows [R, D], by local expert", 2),
        ("compute", "experts.forward", "rows [R, D]", "y [R, D]", 3),
        ("combine", "dispatcher.combine", "y [R, D]", "out [T, D], weighted sums", 2),
    )
    p = Picture(450, "The five steps of a layer: decide, count, dispatch, compute, combine")
    for i, (name, call, given, made, colour) in enumerate(steps):
        y = 10 + 82 * i
        p.rect(10, y, 620, 62)
        p.rect(10, y, 104, 62, f"c{colour}")
        p.text(62, y + 37, name, "on bold middle")
        p.text(126, y + 37, call, "text code")
        p.text(324, y + 26, given, "muted small")
        p.text(304, y + 50, "→", "muted small")
        p.text(324, y + 50, made, "text small")
        if i < 4:
            p.line(62, y + 62, 62, y + 80)
    p.text(320, 436, "T tokens here · K experts per token · D width · R rows received", "muted small middle")
    return p


def nodes(p, x, y, title, note):
    """Two nodes of three ranks; returns the middles of the ranks. The token is on rank 0, its experts on 1, 3 and 4."""
    p.text(x + 4, y + 18, title, "text bold")
    p.text(x + 4, y + 40, note, "muted small")
    middles = []
    for node in range(2):
        left = x + 180 * node
        p.rect(left, y + 50, 126, 142)
        for local in range(3):
            rank, top = 3 * node + local, y + 58 + 44 * local
            p.rect(left + 8, top, 110, 38, "inner", 4)
            p.text(left + (16 if node == 0 else 108), top + 25, f"rank {rank}", "muted small" + (" end" if node else ""))
            count = {1: 1, 3: 2, 4: 2}.get(rank, 0)
            for row in range(count):
                p.rect(left + (92 if node == 0 else 16), top + 4 + 16 * row, 14, 13, "c1", 2)
            middles.append((left + (92 if node == 0 else 16), top + 19))
    p.rect(x + 88, y + 67, 20, 20, "c0", 3)
    return middles


def strategies():
    """How one token reaches five experts on three ranks with each strategy."""
    p = Picture(452, "One token and five experts on two nodes: four rows between the nodes with alltoall, three with "
                     "allgather, two with direct, one with hierarchical")
    panels = (
        ("allgather", "3 rows cross: every rank"), ("alltoall", "4 rows cross: every expert"),
        ("direct", "2 rows cross: every rank in need"), ("hierarchical", "1 row crosses: every node in need"),
    )
    for i, (name, note) in enumerate(panels):
        x, y = 6 + 322 * (i % 2), 6 + 206 * (i // 2)
        m = nodes(p, x, y, name, note)
        start = (x + 110, m[0][1])
        p.line(x + 98, y + 88, x + 98, m[1][1] - 14)
        if name == "allgather":
            p.path(f"M{x + 108} {y + 82} L{x + 113} {y + 82} L{x + 113} {m[2][1]}", "line", True)
        across = {"allgather": ((3, 0), (4, 0), (5, 0)), "alltoall": ((3, -7), (3, 7), (4, -7), (4, 7)),
                  "direct": ((3, 0), (4, 0)), "hierarchical": ((3, 0),)}[name]
        for rank, shift in across:
            p.line(start[0], start[1], m[rank][0] - 3, m[rank][1] + shift)
        if name == "hierarchical":
            p.line(x + 223, m[3][1] + 14, x + 223, m[4][1] + 2)
            p.line(x + 223, m[4][1] + 2, m[4][0] + 17, m[4][1] + 2)
    p.rect(46, 424, 16, 16, "c0", 3)
    p.text(70, 438, "the token", "muted small")
    p.rect(176, 424, 16, 16, "c1", 3)
    p.text(200, 438, "its rows: five experts on ranks 1, 3 and 4", "muted small")
    return p


def hierarchical():
    """A token crosses once; its gateway stores it into the final rows."""
    p = Picture(362, "With hierarchical a token crosses to each node once, to the gateway with the sender's position, which "
                     "stores it into the final rows of its node")
    for node in range(2):
        x = 14 + 366 * node
        p.text(x + 123, 26, f"node {node}", "text bold middle")
        p.rect(x, 38, 246, 262)
        for local in range(4):
            y = 50 + 62 * local
            p.rect(x + 12, y, 222, 52, "inner", 4)
            p.text(x + (22 if node == 0 else 224), y + 32, f"rank {4 * node + local}", "muted small" + (" end" if node else ""))
    for local in (0, 2, 3):
        p.line(250, 76 + 62 * local, 390, 76 + 62 * local, "faint", False)
    p.rect(206, 128, 20, 20, "c0", 3)
    p.line(230, 138, 398, 138)
    p.text(320, 126, "1 row", "text small middle")
    p.rect(402, 128, 20, 20, "c0", 3)
    p.text(434, 143, "gateway", "text small")
    for local in (0, 2, 3):
        y = 76 + 62 * local
        p.rect(474, y - 10, 20, 20, "c1", 3)
        p.path(f"M{412} {128 if local == 0 else 148} L{412} {y} L{471} {y}", "line", True)
    p.text(16, 326, "Out: the gateway stores the token into its final rows on the node.", "muted small")
    p.text(16, 350, "Back: it sends those rows, or with partial_sums their sum.", "muted small")
    return p


def mesh():
    """tp2 cp2 dp2 beside ep4 edp2, on eight ranks."""
    p = Picture(386, "Eight ranks as two grids: tensor, context and data parallelism for attention; expert parallelism and "
                     "replicas for the experts")
    p.text(10, 28, "dense parts: tp 2 × cp 2 × dp 2", "text bold")
    p.text(10, 196, "experts: ep 4 × edp 2", "text bold")
    for dp in range(2):
        x = 66 + 288 * dp
        p.text(x + 110, 56, f"dp {dp}", "muted small middle")
        for cp in range(2):
            if dp == 0:
                p.text(10, 90 + 46 * cp, f"cp {cp}", "muted small")
            for tp in range(2):
                rank = tp + 2 * (cp + 2 * dp)
                p.rect(x + 114 * tp, 64 + 46 * cp, 106, 40, f"c{rank % 4}")
                p.text(x + 114 * tp + 53, 90 + 46 * cp, f"rank {rank}", "on bold middle")
    for edp in range(2):
        p.text(10, 258 + 46 * edp, f"edp {edp}", "muted small")
        for ep in range(4):
            rank = ep + 4 * edp
            x = 66 + 142 * ep
            if edp == 0:
                p.text(x + 64, 224, f"experts {2 * ep}, {2 * ep + 1}", "muted small middle")
            p.rect(x, 232 + 46 * edp, 128, 40, f"c{ep}")
            p.text(x + 64, 258 + 46 * edp, f"rank {rank}", "on bold middle")
    p.text(10, 348, "A dispatch stays within a row of the lower grid. The gradients of", "muted small")
    p.text(10, 370, "experts are summed down its columns, each of which has one colour.", "muted small")
    return p


PICTURES = {"overview": overview, "five_steps": five_steps, "strategies": strategies, "hierarchical": hierarchical, "mesh": mesh}


def main():
    drawn = {FOLDER / f"{name}.svg": draw().svg() for name, draw in PICTURES.items()}
    if sys.argv[1:] == ["--check"]:
        stale = [path for path, text in drawn.items() if not path.exists() or path.read_text() != text]
        stale += sorted(set(FOLDER.glob("*")) - drawn.keys())
        for path in stale:
            print(f"{path.relative_to(FOLDER.parents[1])} is not what tools/diagrams.py draws; run tools/diagrams.py")
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for path, text in drawn.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
