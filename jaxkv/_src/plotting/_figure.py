"""A figure that Jupyter shows by itself. Imported only when something is drawn."""

import io

from matplotlib.figure import Figure

DPI = 90


class NotebookFigure(Figure):
    """A figure without pyplot: nothing is shown twice and nothing must be closed."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()
