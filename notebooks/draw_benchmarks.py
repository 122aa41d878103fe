"""Draws figures of tests/benchmarks/README.md, from its tables: ``served.svg`` and others."""

import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
TABLES = HERE.parent / "tests" / "benchmarks" / "README.md"
COLOURS = "#0072B2", "#E69F00", "#009E73"  # for colour-blind readers, too
INK, WIDTH, LEFT, BAR, STEP = "#24292f", 760, 310, 18, 26


class Case(NamedTuple):
    name: str
    ours: str
    theirs: str
    unit: str
    colour: int = 0
    told: str = ""  # where the table has a ratio, the worst of several GPUs

    @property
    def ratio(self) -> float:
        ours, theirs = (float(number.replace(",", "")) for number in (self.ours, self.theirs))
        return float(self.told) if self.told else theirs / ours


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of all rows of tables between a heading and the next one."""
    lines = TABLES.read_text().partition(f"\n{heading}\n")[2].partition("\n#")[0].splitlines()
    assert lines, f"{TABLES} has no heading {heading!r}"
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]


def numbers(cell: str) -> list[str]:
    return re.findall(r"\d[\d,]*(?:\.\d+)?", cell)


def served() -> Iterator[Case]:
    table = rows("## served")
    for name, pattern, at, colour in (
        ("Llama-3.1-8B, decode 1 x 8k", "decode 1 x 8k; 64 x 2k", 0, 0),
        ("decode 64 x 2k", "decode 1 x 8k; 64 x 2k", 1, 0),
        ("decode 256 x 1k", "decode 1 x 8k; 64 x 2k", 2, 0),
        ("prefill 4 x 2k", "prefill 4 x 2k", 0, 0),
        ("512 requests at once", "512 requests at once", 0, 0),
        ("first token at 24 requests a second, p50", "the same, 24 a second", 0, 0),
        ("rollouts, 64 prompts x 8 samples", ".*shared_prefixes=32", 0, 0),
        ("Gemma-3-12B, decode 64 x 2k", "Gemma-3-12B, decode 64 x 2k", 1, 1),
        ("Qwen3.5-4B, decode 64 x 2k", "Qwen3.5-4B, decode 64 x 2k", 0, 2),
        ("decode 256 x 1k", "Qwen3.5-4B, decode 64 x 2k", 1, 2),
    ):
        _, ours, theirs, ratio, *_ = next(row for row in table if re.match(pattern, row[0]))
        unit, told = "ms" if "ms" in ours else "s", numbers(ratio)
        told = told[min(at, len(told) - 1)]
        yield Case(name, numbers(ours)[at], numbers(theirs)[at], unit, colour, told)


def attention() -> Iterator[Case]:
    for cells in rows("### Whole calls"):
        if cells[0].startswith(("bf16", "fp8")) and len(cells) == 6:
            name = cells[0].rpartition(",")[0].replace(" with 4 queries each", " x 4 queries")
            colour = int(name.startswith("fp8"))
            yield Case(f"decode, {name}", *numbers(cells[1]), *numbers(cells[3]), "us", colour)
    for cells in rows("### Prefill")[2:]:
        if len(cells) == 6 and cells[4] and "MLA" not in cells[0]:
            yield Case(f"prefill, {cells[0]}", numbers(cells[1])[0], *numbers(cells[2]), "us", 2)


def host() -> Iterator[Case]:
    (_, *cases), _, (_, *ours), (_, *theirs), *_ = rows("## host")
    for at, name in enumerate(cases):
        one, other = numbers(ours[at]), numbers(theirs[at])
        yield Case(f"groups: {cases[0]} {name if at else ''}", *one, *other, "us")


def draw(title: str, note: str, cases: list[Case]) -> str:
    """Returns a picture of their time by ours, a bar each."""
    scale = (WIDTH - LEFT - 160) / max(case.ratio for case in cases)
    end = 74 + STEP * len(cases)
    parts = [
        f'<text x="14" y="28" font-size="15" font-weight="bold">{title}</text>',
        f'<text x="14" y="50" font-size="13" fill-opacity="0.75">{note}</text>',
    ]
    for number, case in enumerate(cases):
        y, length = 66 + STEP * number, case.ratio * scale
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{case.name}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" '
            f'fill="{COLOURS[case.colour]}"/>',
            f'<text x="{LEFT + max(length, scale) + 7:.1f}" y="{y + 14}"><tspan font-weight="bold">'
            f"{case.ratio:.{2 if case.ratio < 10 else 0}f}</tspan> "
            f"{case.ours} : {case.theirs} {case.unit}</text>",
        ]
    one = LEFT + scale
    parts.append(
        f'<path d="M{one:.1f} 60 V{end - 8}" stroke="{INK}" stroke-dasharray="4 3" fill="none"/>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end}" font-size="13" '
        f'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{title}" fill="{INK}">'
        f'<rect width="{WIDTH}" height="{end}" rx="12" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def span(cases: list[Case], colour: int | None = None) -> str:
    ratios = [case.ratio for case in cases if colour in (None, case.colour)]
    low, high = (f"{ratio:.{2 if ratio < 10 else 0}f}" for ratio in (min(ratios), max(ratios)))
    return f"{low} to {high}"


def pictures() -> dict[str, str]:
    """Returns the text of each file."""
    of_models, of_kernels, of_host = list(served()), list(attention()), list(host())
    return {
        "served.svg": draw(
            f"Served models on one H200: {span(of_models)} times the speed of vLLM",
            "vLLM's time by jaxkv's (jaxkv : vLLM 0.23), both in the same order; dashed: equal",
            of_models,
        ),
        "attention.svg": draw(
            f"Attention by FA3's speed: fp8 {span(of_kernels, 1)}, bf16 {span(of_kernels, 0)}, "
            f"prefill {span(of_kernels, 2)}",
            "One H200, FA3's time by jaxkv's (jaxkv : FA3); query heads/KV heads x width",
            of_kernels,
        ),
        "host.svg": draw(
            f"Blocks of a decode step on the host: {span(of_host)} times as fast as in vLLM",
            "256 decodes on a CPU; vLLM's time by jaxkv's (jaxkv : vLLM 0.33)",
            of_host,
        ),
    }


def main() -> None:
    for name, text in pictures().items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
