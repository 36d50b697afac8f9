"""Who did what when: a run's role timeline as text and as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from gyre_backend.cells.state import Role
from gyre_backend.sim.result import SimResult

_LETTER = {Role.ROLLOUT: "·", Role.TO_TRAINING: ">", Role.TRAINING: "█", Role.TO_ROLLOUT: "<", Role.LOST: "x"}
_COLOUR = {
    Role.ROLLOUT: "#9ecae1",
    Role.TO_TRAINING: "#fdd0a2",
    Role.TRAINING: "#e6550d",
    Role.TO_ROLLOUT: "#fdd0a2",
    Role.LOST: "#636363",
}


def spans(result: SimResult, start: float, end: float) -> Iterator[tuple[int, Role, float, float]]:
    """(cell, role, from, to), clipped to [start, end], cell by cell."""
    for cell in range(result.num_cells):
        changes = [(time, role) for time, number, role in result.roles if number == cell]
        for (begin, role), (after, _) in zip(changes, [*changes[1:], (end, Role.LOST)], strict=True):
            first, last = max(begin, start), min(after, end)
            if last > first:
                yield cell, role, first, last


def window(result: SimResult, first: int, steps: int) -> tuple[float, float]:
    """From the publishing of the step before `first` to that of the last of `steps`."""
    start = result.steps[first - 1].published if first else 0.0
    return start, result.steps[min(first + steps, len(result.steps)) - 1].published


def text(result: SimResult, start: float, end: float, width: int = 96) -> str:
    """A line per cell (`·` rollout, `█` training, `>` `<` moving), the role that filled most of each column;
    `|` = published."""
    if end <= start:
        return ""
    column = (end - start) / width
    shares: list[list[dict[Role, float]]] = [[{} for _ in range(width)] for _ in range(result.num_cells)]
    for cell, role, begin, after in spans(result, start, end):
        at = int((begin - start) / column)
        while at < width and start + at * column < after:
            overlap = min(after, start + (at + 1) * column) - max(begin, start + at * column)
            shares[cell][at][role] = shares[cell][at].get(role, 0.0) + overlap
            at += 1
    lines = []
    for cell, row in enumerate(shares):
        letters = "".join(_LETTER[max(s, key=lambda r: s[r])] if s else " " for s in row)
        lines.append(f"{'core ' if cell == 0 else f'sat {cell}':6}{letters}")
    marks = [" "] * width
    for step in result.steps:
        if start < step.published <= end:
            marks[min(int((step.published - start) / column), width - 1)] = "|"
    lines.append(f"{'steps':6}{''.join(marks)}")
    lines.append(f"{'':6}{_clock(start):<{width // 2}}{_clock(end):>{width - width // 2}}")
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds:.0f} s"


def svg(panels: list[tuple[str, SimResult]], start_step: int = 0, steps: int = 4, width: int = 900) -> str:
    """One panel per run on a common time axis that begins at `start_step` of each; dashed lines are published
    steps."""
    row, gap, left, head = 14, 46, 64, 30
    length = max(b - a for a, b in (window(r, start_step, steps) for _, r in panels))
    scale = (width - left - 12) / length
    height = head + sum(result.num_cells * row + gap for _, result in panels) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    x = left
    for role, name in ((Role.ROLLOUT, "rollout"), (Role.TRAINING, "training"), (Role.TO_TRAINING, "moving")):
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{_COLOUR[role]}"/>')
        parts.append(f'<text x="{x + 17}" y="18">{name}</text>')
        x += 86
    parts.append(f'<text x="{x}" y="18">dashed: weights published</text>')
    top = head
    for title, result in panels:
        parts += _panel(title, result, (start_step, steps), (left, top + 16, row, scale, length))
        top += result.num_cells * row + gap
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(
    title: str,
    result: SimResult,
    steps: tuple[int, int],
    frame: tuple[float, float, float, float, float],
) -> Iterator[str]:
    left, top, row, scale, length = frame
    start, end = window(result, *steps)
    yield f'<text x="{left}" y="{top - 4}" font-weight="bold">{escape(title)}</text>'
    for cell in range(result.num_cells):
        name = "core" if cell == 0 else f"cell {cell}"
        yield f'<text x="{left - 6}" y="{top + cell * row + row - 4}" text-anchor="end">{name}</text>'
    for cell, role, begin, after in spans(result, start, end):
        wide = max((after - begin) * scale, 0.4)
        yield (
            f'<rect x="{left + (begin - start) * scale:.1f}" y="{top + cell * row:.1f}" width="{wide:.1f}" '
            f'height="{row - 2}" fill="{_COLOUR[role]}"/>'
        )
    bottom = top + result.num_cells * row
    for step in result.steps:
        if start < step.published <= end:
            x = left + (step.published - start) * scale
            yield (
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 2}" y2="{bottom}" stroke="#333" stroke-dasharray="3 2"/>'
            )
    for tick in range(5):
        seconds = length * tick / 4
        anchor = "end" if tick == 4 else "middle"
        yield (
            f'<text x="{left + seconds * scale:.1f}" y="{bottom + 12}" text-anchor="{anchor}" fill="#555">'
            f"{_clock(seconds)}</text>"
        )
