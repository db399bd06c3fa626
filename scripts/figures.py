"""The figures that are drawn from results, as SVG; scripts/pages.py writes the files.

Text stays text, and nothing depends on an installed font or a plotting library: the same results
give the same file everywhere, so a test can tell when a figure is out of date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, MUTED, PAPER = "#1f2933", "#5f6b7a", "#ffffff"
GREY, BLUES = "#9aa5b1", ("#bcdcf0", "#8fc1e3", "#4b93c7", "#17609b")


@dataclass
class Canvas:
    """A drawing of `width` x `height` units, about one pixel each on a page."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, r: float = 3) -> None:
        """Draw a rectangle with corners of radius `r`."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" fill="{fill}" '
            'stroke="none"/>'
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


WIDTH = 460  # a phone shows the figures at three quarters of their size, on which text is legible


def foot(canvas: Canvas, x: float, y: float, measured: str) -> None:
    """Write the machine and date, and below them the versions."""
    for number, line in enumerate(measured.split("; ")):
        canvas.text(x, y + 14 * number, line, 10.5, fill=MUTED)


# The name of a measurement, its speedups over the baseline with each addition, the label.
Bar = tuple[str, Sequence[float], str]


def gains(groups: Sequence[tuple[str, Sequence[Bar]]], parts: Sequence[str], measured: str) -> str:
    """The gain of each addition, one bar for each workload.

    Args:
        groups: headings, with the bars below them; speeds grow from addition to addition.
        parts: names of the baseline and of at most four additions, for the legend.
        measured: the machine and versions of the measurements, one line.
    """
    left, unit = 16, 140  # a bar's start, and the baseline's length
    colours = (GREY, *BLUES)
    bars = sum(len(each) for _, each in groups)
    canvas = Canvas(WIDTH, 92 + 38 * bars + 30 * len(groups) + 38, "What makes ncclep faster")
    title = "Times as fast as Megatron-Core's fastest without CUDA graphs"
    canvas.text(left, 28, title, 14.5, bold=True)
    for number, (part, colour) in enumerate(zip(parts, colours, strict=False)):
        x, y = left + 180 * (number % 2), 42 + 20 * (number // 2)
        canvas.rect(x, y, 12, 12, colour)
        canvas.text(x + 18, y + 11, part, 12.5)
    y = 90
    for heading, each in groups:
        canvas.text(left, y + 14, heading, 13, bold=True)
        y += 24
        for what, speeds, label in each:
            canvas.text(left, y + 12, f"{what}: {label}", 12.5)
            for start, end, colour in zip((0.0, *speeds), speeds, colours, strict=False):
                # Narrow parts are drawn without round corners, which would hide them.
                canvas.rect(left + unit * start, y + 17, unit * (end - start), 14, colour, r=0)
            y += 38
        y += 6
    foot(canvas, left, y + 14, measured)
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
    margin, left, unit = 16, 140, 98  # a bar's start, and the length of the links' time
    bars = sum(len(each) for *_, each in groups)
    canvas = Canvas(WIDTH, 92 + 26 * bars + 40 * len(groups) + 34, "ncclep beside other libraries")
    title = "Dispatch and combine, forward and backward, on 4 GPUs"
    canvas.text(margin, 28, title, 14.5, bold=True)
    canvas.text(margin, 49, "With the plan; libraries in their fastest setting.", 12.5)
    canvas.text(margin, 66, "Lines: the time that the links need, 1x.", 12.5)
    y = 80
    for shape, limit, each in groups:
        canvas.text(margin, y + 16, f"{shape}: the links need {limit:,.0f} us", 13, bold=True)
        y, top = y + 26, y + 24
        for number, (name, us) in enumerate(each):
            canvas.text(left - 8, y + 15, name, 12.5, at="end")
            length = 0.0 if us is None else unit * us / limit
            canvas.rect(left, y, length, 20, BLUES[-1] if number == 0 else GREY, r=0)
            times = "" if us is None else f"{us:,.0f} us, {us / limit:.2f}x"
            canvas.text(left + length + 6, y + 15, times or "refused", 12.5)
            y += 26
        line = f"M{left + unit:g} {top:g}L{left + unit:g} {y:g}"
        canvas.parts.append(f'<path d="{line}" stroke="{INK}" fill="none"/>')
        y += 14
    foot(canvas, margin, y + 14, measured)
    return canvas.svg()
