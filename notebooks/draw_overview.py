"""Draws ``overview.svg``, the picture of README.md, from a real block manager."""

import pathlib
from collections.abc import Sequence

import numpy as np

import jaxkv

BLOCK, TOKENS = 4, {"a": 11, "b": 10, "c": 6}
COLOURS = {"a": "#0072B2", "b": "#E69F00", "c": "#009E73"}  # for colour-blind readers, too
INK, PALE, WIDTH, HEIGHT = "#24292f", "#eef1f4", 1000, 372
CELL = 26


class Picture:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, size: int = 15, **style: str) -> None:
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{INK}"{extra}>{words}</text>'
        )

    def box(self, x: float, y: float, fill: str, words: object = "", width: float = CELL) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{CELL}" rx="3" fill="{fill}" '
            f'stroke="{INK}" stroke-width="0.8"/>'
        )
        ink = "#ffffff" if fill in (COLOURS["a"], COLOURS["c"]) else INK
        self.parts.append(
            f'<text x="{x + width / 2:g}" y="{y + 18:g}" font-size="13" text-anchor="middle" '
            f'fill="{ink}">{words}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{INK}" stroke-width="2" '
            'fill="none" marker-end="url(#head)"/>'
        )

    def panel(self, x: float, width: float, title: str, where: str, note: Sequence[str]) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="56" width="{width:g}" height="300" rx="10" fill="{PALE}"/>'
        )
        self.text(x + 14, 82, title, 17, font_weight="bold")
        self.text(x + 14, 102, where, 13, fill_opacity="0.7")
        for i, line in enumerate(note):
            self.text(x + 14, 316 + 19 * i, line, 14)

    def svg(self) -> str:
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="Helvetica, Arial, sans-serif" role="img" aria-label="The block manager '
            "maps requests to cache blocks, one int32 array per step updates block tables and pool "
            'on the GPU, and attention reads both.">'
            f'<defs>{head}</defs><rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>'
            f"{''.join(self.parts)}</svg>\n"
        )


def run_steps() -> tuple[dict[str, tuple[int, ...]], np.ndarray]:
    """Returns the blocks of three requests, two of which begin alike, and the last upload."""
    spec = jaxkv.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8)
    plan = jaxkv.plan_cache({"layer": spec}, 2**20, max_model_len=16, num_blocks_override=13)
    manager = jaxkv.BlockManager(plan, max_requests=3)
    shape = jaxkv.StepShape.for_plan(plan, max_requests=3, max_tokens=24, cached_tokens=16)
    manager.start("a", range(TOKENS["a"]))
    manager.step(shape, {"a": TOKENS["a"]})
    hit = manager.start("b", [*range(2 * BLOCK), 90, 91])
    manager.start("c", range(50, 50 + TOKENS["c"]))
    work = {"b": TOKENS["b"] - hit.num_cached_tokens, "c": TOKENS["c"]}
    upload = manager.step(shape, {"a": 1, **work})
    return {name: manager.block_ids(name)[0] for name in TOKENS}, upload.data


def main() -> None:
    blocks, upload = run_steps()
    shared = set(blocks["a"]) & set(blocks["b"])
    picture = Picture()
    picture.text(20, 36, "One step of three requests; b begins as a does", 19, font_weight="bold")

    picture.panel(14, 170, "Requests", "on the host", ["tokens in,", "tokens out"])
    for i, (name, count) in enumerate(TOKENS.items()):
        y = 124 + 56 * i
        picture.box(28, y, COLOURS[name], name)
        picture.text(62, y + 18, f"{count + (name == 'a')} tokens", 14)

    picture.panel(
        204, 186, "Block manager", "on the host", ["maps requests to blocks,", "shares prefixes"]
    )
    for i, (name, ids) in enumerate(blocks.items()):
        y = 124 + 56 * i
        picture.box(218, y, COLOURS[name], name)
        for j, block in enumerate(ids):
            fill = "#ffffff" if block in shared else COLOURS[name]
            picture.box(258 + 31 * j, y, fill, block)

    picture.panel(410, 120, "Upload", "one int32 array", ["all that a step", "changes"])
    for i, number in enumerate(upload[:8].tolist()):
        picture.box(424 + 46 * (i % 2), 120 + 33 * (i // 2), "#ffffff", number, 40)
    picture.text(424, 270, "...", 18)

    picture.panel(
        550,
        250,
        "Tables and pool",
        "one pytree on the device",
        ["immutable: a step returns", "the next one, in place"],
    )
    for i, ids in enumerate(blocks.values()):
        for j in range(4):
            picture.box(564 + 29 * j, 118 + 30 * i, "#ffffff", ids[j] if j < len(ids) else 0)
    owner = {block: name for name, ids in blocks.items() for block in ids if block not in shared}
    for block in range(13):
        x, y = 564 + 31 * (block % 7), 222 + 36 * (block // 7)
        fill = "#ffffff" if block in shared or block not in owner else COLOURS[owner[block]]
        picture.box(x, y, fill if block else "#c9ced4", block)
        if block in shared:  # of a and b
            for k, name in enumerate("ab"):
                picture.parts.append(
                    f'<rect x="{x + 2 + 11 * k:g}" y="{y + 21}" width="11" height="4" '
                    f'fill="{COLOURS[name]}"/>'
                )

    picture.panel(
        820, 166, "Attend", "in your model", ["each layer writes,", "then reads its pages"]
    )
    for i, name in enumerate(TOKENS):
        y = 130 + 56 * i
        picture.box(834, y, COLOURS[name], "q")
        picture.arrow(864, y + 13, 892, y + 13)
        for j in range(2):
            picture.box(898 + 29 * j, y, "#ffffff", "kv"[j])
        picture.text(960, y + 18, "out", 13)
    for x, to_x in ((184, 203), (390, 409), (530, 549), (800, 819)):
        picture.arrow(x, 206, to_x, 206)
    pathlib.Path(__file__).with_name("overview.svg").write_text(picture.svg())


if __name__ == "__main__":
    main()
