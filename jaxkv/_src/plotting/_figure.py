"""A figure that Jupyter shows by itself. Imported only when something is drawn."""

import io

from matplotlib.figure import Figure

DPI, SCALE = 90, 2  # as it is shown; its pixels for each of these, for dense screens


class NotebookFigure(Figure):
    """A figure without pyplot: nothing is shown twice and nothing must be closed."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Returns the picture, and the width at which Jupyter shows it."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=SCALE * DPI)
        return buffer.getvalue(), {"width": round(self.get_figwidth() * DPI)}
