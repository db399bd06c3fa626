"""The figures that are drawn from results, as SVG; scripts/pages.py writes the files.

Text stays text, and nothing depends on an installed font or a plotting library: the same results
give the same file everywhere, so a test can tell when a figure is out of date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, MUTED, LINE, PAPER = "#1f2933", "#5f6b7a", "#c3cad3", "#ffffff"
GREY, BLUES = "#9aa5b1", ("#bcdcf0", "#8fc1e3", "#4b93c7", "#17609b")


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
        parts: names of the baseline and of at most four additions, for the legend.
        measured: the machine and versions of the measurements, one line.
    """
    left, unit = 176, 50  # a bar's start, and the baseline's length
    colours = (GREY, *BLUES)
    bars = sum(len(each) for _, each in groups)
    canvas = Canvas(640, 84 + 30 * bars + 30 * len(groups) + 34, "What makes ncclep faster")
    title = "Times as fast as Megatron-Core's fastest without CUDA graphs"
    canvas.text(20, 30, title, 16, bold=True)
    for number, (part, colour) in enumerate(zip(parts, colours, strict=False)):
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
    canvas.text(20, y + 16, measured, 10.5, fill=MUTED)
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
    settings = "With the plan; libraries in their fastest setting. Lines: the time the links need"
    canvas.text(20, 52, settings, 12.5)
    y = 70
    for shape, limit, each in groups:
        canvas.text(20, y + 16, f"{shape}: the links need {limit:,.0f} us", 13, bold=True)
        y, top = y + 26, y + 24
        for number, (name, us) in enumerate(each):
            canvas.text(left - 8, y + 15, name, 12.5, at="end")
            length = 0.0 if us is None else unit * us / limit
            canvas.rect(left, y, length, 20, BLUES[-1] if number == 0 else GREY, r=0)
            times = "" if us is None else f"{us:,.0f} us, {us / limit:.2f} times as long"
            canvas.text(left + length + 6, y + 15, times or "refuses this shape", 12.5)
            y += 26
        canvas.line(left + unit, top, left + unit, y, INK)
        y += 14
    canvas.text(20, y + 16, measured, 11.5, fill=MUTED)
    return canvas.svg()
