"""`gyre verify-template MODEL`: does a model's template extend turns token for token?"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyre_sdk.capture.renderer import verify_template as prove


def verify_template(model: Path, *, family: str = "auto") -> int:
    """Prove, for a tokenizer on disk, whether each kind of turn extends the context bit by bit.

    Exit code 1 when a turn is extended to something else than the full render. The engine then still sees exactly what is
    recorded and trained; it is only not what the template would have said.

    Parameters
    ----------
    model
        Model folder with tokenizer.json and a chat template.
    family
        auto, template, or a family of the `renderers` package.
    """
    report = prove(model, family)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("turn", "extends", "first difference", "note"):
        table.add_column(column)
    for check in report.checks:
        word = ("yes" if check.exact else "DIFFERS") if check.bridged else "no: rendered anew"
        style = "green" if check.bridged and check.exact else "red" if check.bridged else "yellow"
        difference = ""
        if check.position >= 0:
            difference = f"token {check.position}: expected {check.expected!r}, got {check.got!r}"
        table.add_row(check.name, Text(word, style=style), Text(difference), Text(check.note))
    console = Console()
    console.print(Text(f"{report.model_dir}: renderer {report.family}"))
    console.print(table)
    return 1 if any(check.bridged and not check.exact for check in report.checks) else 0
