"""A drawing board: an image at twice its size, scaled down when saved, so that edges and letters are smooth."""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SCALE = 2
PAPER, INK = "#ffffff", "#1f2933"


class Sheet:
    """The few shapes that a timeline needs; positions and sizes in pixels of the saved picture."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
        self.pen = ImageDraw.Draw(self.image)

    def box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        corners = [round(edge * SCALE) for edge in (left, top, max(right, left + 0.5), bottom)]
        self.pen.rectangle((corners[0], corners[1], corners[2] - 1, corners[3] - 1), fill=colour)

    def hatch(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        size = max(SCALE, round((right - left) * SCALE)), round((bottom - top) * SCALE)
        tile = Image.new("RGB", size, PAPER)
        pen, step = ImageDraw.Draw(tile), 6 * SCALE
        for start in range(-size[1], size[0] + size[1], step):
            pen.line((start, size[1], start + size[1], 0), fill=colour, width=2 * SCALE)
        pen.rectangle((0, 0, size[0] - 1, size[1] - 1), outline=colour, width=SCALE)
        self.image.paste(tile, (round(left * SCALE), round(top * SCALE)))

    def line(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        self.pen.line([round(edge * SCALE) for edge in (left, top, right, bottom)], fill=colour, width=SCALE)

    def text(self, x: float, y: float, text: str, *, size: int, colour: str = INK, anchor: str = "lm") -> None:
        self.pen.text((x * SCALE, y * SCALE), text, fill=colour, font=_font(size), anchor=anchor)

    def save(self, path: Path) -> tuple[int, int]:
        size = self.image.width // SCALE, self.image.height // SCALE
        self.image.resize(size, Image.Resampling.LANCZOS).save(path, format="PNG", optimize=True)
        return size


def text_width(text: str, size: int) -> float:
    return _font(size).getlength(text) / SCALE


def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size * SCALE)
    assert isinstance(font, ImageFont.FreeTypeFont)  # a Pillow without FreeType has one small bitmap font
    return font
