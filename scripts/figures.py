"""The figures that are drawn from results, as SVG; scripts/pages.py writes the files.

Text stays text, and nothing depends on an installed font or a plotting library: the same results
give the same file everywhere, so a test can tell when a figure is out of date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

INK, MUTED, LINE, PAPER = "#1f2933", "#5f6b7a", "#c3cad3", "#ffffff"
GREY, BLUES = "#9aa5b1", ("#8fc1e3", "#4b93c7", "#17609b")


@dataclass
class Canvas:
    """A drawing of `width` x `height` units, about one pixel each on a page."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, edge: str = "none", r: float = 3
    ) -> None:
        """Draw a rectangle with corners of radius `r`."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" fill="{fill}" '
            f'stroke="{edge}"/>'
        )

    def text(
        self, x: float, y: float, what: str, size: float = 13, at: str = "start", fill: str = INK,
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Write `what` on the baseline `y`; `at` is start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{at}" '
            f'fill="{fill}"{weight}>{escape(what)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = LINE) -> None:
        """Draw a thin line."""
        self.parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{stroke}" fill="none"/>')

    def curve(
        self, points: Sequence[tuple[float, float]], stroke: str, dashed: bool = False
    ) -> None:
        """Draw lines from point to point."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="M{path}" stroke="{stroke}" stroke-width="2" fill="none"{dashes}/>'
        )

    def svg(self) -> str:
        """The whole file."""
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            'font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{PAPER}"/>',
            *self.parts,
            "</svg>\n",
        ])  # fmt: skip


# The name of a measurement, its speedups over the baseline with each addition, the label.
Bar = tuple[str, Sequence[float], str]


def gains(groups: Sequence[tuple[str, Sequence[Bar]]], parts: Sequence[str], measured: str) -> str:
    """The gain of each addition, one bar for each workload.

    Args:
        groups: headings, with the bars below them; speeds grow from addition to addition.
        parts: names of the baseline and the additions, for the legend.
        measured: the machine and versions of the measurements, one line.
    """
    left, unit = 176, 50  # a bar's start, and the baseline's length
    colours = (GREY, *BLUES)
    bars = sum(len(each) for _, each in groups)
    canvas = Canvas(640, 84 + 30 * bars + 30 * len(groups) + 34, "What makes ncclep faster")
    canvas.text(20, 30, "Times as fast as Megatron's alltoall", 16, bold=True)
    for number, (part, colour) in enumerate(zip(parts, colours, strict=True)):
        x, y = 20 + 300 * (number % 2), 46 + 20 * (number // 2)
        canvas.rect(x, y, 12, 12, colour)
        canvas.text(x + 18, y + 11, part, 12.5)
    y = 90
    for heading, each in groups:
        canvas.text(20, y + 14, heading, 13, bold=True)
        y += 24
        for what, speeds, label in each:
            canvas.text(left - 8, y + 15, what, 12.5, at="end")
            for start, end, colour in zip((0.0, *speeds), speeds, colours, strict=False):
                # Narrow parts are drawn without round corners, which would hide them.
                canvas.rect(left + unit * start, y, unit * (end - start), 20, colour, r=0)
            canvas.text(left + unit * speeds[-1] + 6, y + 15, label, 12.5)
            y += 30
        y += 6
    canvas.text(20, y + 16, measured, 11.5, fill=MUTED)
    return canvas.svg()


def libraries(
    groups: Sequence[tuple[str, float, Sequence[tuple[str, float | None]]]], measured: str
) -> str:
    """Sums of a plan and four passes, beside the time that the links need for them.

    Args:
        groups: a shape, the links' time, and names of libraries with their sums, or None where a
            library refuses the shape.
        measured: the machine and versions of the measurements, one line.
    """
    left, unit = 176, 140  # a bar's start, and the length of the links' time
    bars = sum(len(each) for *_, each in groups)
    canvas = Canvas(700, 84 + 26 * bars + 40 * len(groups) + 24, "ncclep beside other libraries")
    canvas.text(20, 30, "Dispatch and combine, forward and backward, on 4 GPUs", 16, bold=True)
    settings = "With the plan; each in its fastest setting. Lines: the time that the links need"
    canvas.text(20, 52, settings, 12.5)
    y = 70
    for shape, limit, each in groups:
        canvas.text(20, y + 16, f"{shape}: the links need {limit:,.0f} us", 13, bold=True)
        y, top = y + 26, y + 24
        for number, (name, us) in enumerate(each):
            canvas.text(left - 8, y + 15, name, 12.5, at="end")
            length = 0.0 if us is None else unit * us / limit
            canvas.rect(left, y, length, 20, BLUES[2] if number == 0 else GREY, r=0)
            times = "" if us is None else f"{us:,.0f} us, {us / limit:.2f} times as long"
            canvas.text(left + length + 6, y + 15, times or "refuses this shape", 12.5)
            y += 26
        canvas.line(left + unit, top, left + unit, y, INK)
        y += 14
    canvas.text(20, y + 16, measured, 11.5, fill=MUTED)
    return canvas.svg()


# Curves of the network's timeline: what each counts in a sample, its colour, and its name.  The
# last one is dashed, because it mostly lies on another.
CURVES = (
    (1, BLUES[2], "bytes that have come over the link"),
    (4, "#8b5fb0", "bytes given to the link: rows packed, or the domain's sums made"),
    (3, "#3b8f5a", "from other domains, in place"),
    (2, "#d9822b", "from the rank's own domain, over NVLink, in place"),
)
LEAST_SHARE = 0.05  # a kind with fewer of an operation's rows has no curve


def network_timeline(result: dict[str, Any], measured: str) -> str:
    """What has come over a paced link, and which rows are in place, while two operations run.

    Args:
        result: what `scripts/network_timeline.py` wrote.
        measured: the machine and versions, one line.
    """
    rate, latency_us = result["gb_per_s"], result["latency_us"]
    grid = f"{result['hosts']} x {result['ranks_on_each']} ranks"
    canvas = Canvas(900, 438, f"A dispatch and a combine over links of {rate:g} GB/s")
    canvas.text(24, 34, f"One rank's link of {rate:g} GB/s, {grid}", 16, bold=True)
    names = [(colour, name) for _, colour, name in CURVES]
    for number, (colour, name) in enumerate(
        [*names, (GREY, "bytes over a link that is always busy")]
    ):
        left, low = 24 + 390 * (number % 2), 58 + 20 * (number // 2)
        dashed = number >= len(CURVES) - 1
        canvas.curve([(left, low - 4), (left + 22, low - 4)], colour, dashed)
        canvas.text(left + 30, low, name, 12.5)
    # Both panels have one scale.
    longest_ms = max(of["samples"][-1][0] for of in result["operations"].values()) * 1e-6
    top, height, width = 142, 220, 390
    step = next(ms for ms in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if longest_ms / ms <= 8)
    for left, (name, of) in zip((58, 490), result["operations"].items(), strict=True):
        end_ns, total, *_ = of["samples"][-1]
        whole = {1: total, 2: of["near"], 3: of["far"], 4: of["samples"][-1][4]}
        rows = of["near"] + of["far"]

        def place(ns: float, share: float, left: int = left) -> tuple[float, float]:
            return left + width * ns * 1e-6 / longest_ms, top + height * (1 - share)

        what = "rows" if name == "dispatch" else "sums"
        canvas.text(left, top - 14, f"{name}: {rows:,} {what}, {total / 1e6:.1f} MB", 13, bold=True)
        for share in (0, 0.25, 0.5, 0.75, 1):
            x, y = place(0, share)
            canvas.line(x, y, x + width, y)
            if left < width:
                canvas.text(x - 6, y + 4, f"{100 * share:g} %", 11, "end", MUTED)
        for number in range(int(longest_ms / step) + 1):
            x, y = place(number * step * 1e6, 0)
            canvas.line(x, y, x, y + 4)
            canvas.text(x, y + 18, f"{number * step:g}", 11, "middle", MUTED)
        canvas.text(left + width, top + height + 34, "ms", 11, "end", MUTED)
        start_ns = 1e3 * latency_us
        canvas.curve([place(start_ns, 0), place(start_ns + total / rate, 1)], GREY, dashed=True)
        for at, colour, _ in CURVES:
            if whole[at] >= LEAST_SHARE * rows:
                points = [place(s[0], s[at] / whole[at]) for s in of["samples"]]
                canvas.curve([place(0, 0), *points], colour, dashed=at == CURVES[-1][0])
        canvas.line(*place(end_ns, 0), *place(end_ns, 1), GREY)
        x, y = place(end_ns, 0)
        canvas.text(x - 5, y - 8, f"{end_ns * 1e-6:.2f} ms", 12, "end")
    canvas.text(24, 424, measured, 11.5, fill=MUTED)
    return canvas.svg()
