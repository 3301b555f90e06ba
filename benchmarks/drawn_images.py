"""Draws synthetic training images of subjects that are rare in free photos: façades, brick, grids, text, line art, …

Scenes are drawn at `SUPERSAMPLING` times their size and downscaled, so that edges are antialiased as in a photo. The
same seed and fonts give the same image.
"""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SUPERSAMPLING = 3
_LETTERS = "etaoinshrdlucmfwypvbgkjqxzETAOINSHRDLUCMFWYPVBGKJQXZ0123456789&%§$€()/-:;,.!?"
_WEIGHTS = [12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 1, 2] + [1] * (len(_LETTERS) - 21)
Colour = tuple[int, int, int]
Scene = Callable[[random.Random, int, Sequence[Path]], Image.Image]


def draw_image(index: int, size: int, fonts: Sequence[Path], seed: int = 0) -> tuple[str, Image.Image]:
    """Returns the scene's name and an image of `size` × `size` pixels; scenes take turns by `index`."""
    names = list(SCENES)
    name = names[index % len(names)]
    rng = random.Random(f"{seed}-{name}-{index}")
    large = SCENES[name](rng, size * SUPERSAMPLING, fonts)
    if rng.random() < 0.7:
        large = _lit(rng, large)
    return name, large.resize((size, size), Image.Resampling.BOX if rng.random() < 0.5 else Image.Resampling.LANCZOS)


def find_fonts(folders: Sequence[Path]) -> list[Path]:
    """Returns the fonts of these folders that can draw Latin text, sorted by name."""
    symbols = ("Math", "NonUni", "Siz", "cmex", "cmsy", "cmmi", "LastResort", "Display", "OpenSymbol", "Emoji")
    found = {
        path.name: path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in (".ttf", ".otf") and not any(word in path.name for word in symbols)
    }
    return [found[name] for name in sorted(found)]


def facade(rng: random.Random, side: int, fonts: Sequence[Path]) -> Image.Image:
    """A façade of windows in perspective."""
    return _in_perspective(rng, _windows(rng, side))


def bricks(rng: random.Random, side: int, fonts: Sequence[Path]) -> Image.Image:
    """A brick or stone wall, or a tiled roof or floor, in perspective."""
    wall, mortar = _colour(rng), _colour(rng)
    image = Image.new("RGB", (side, side), mortar)
    draw = ImageDraw.Draw(image)
    height = rng.uniform(5, 30) * SUPERSAMPLING
    width, gap = height * rng.uniform(1, 3.5), max(1, height * rng.uniform(0.04, 0.2))
    shift, spread = rng.choice((0.5, 0.5, 0.5, 0.33, 0)), rng.uniform(5, 40)
    for row in range(int(side / height) + 1):
        for column in range(-1, int(side / width) + 1):
            left, top = (column + shift * (row % round(1 / shift) if shift else 0)) * width, row * height
            box = (left, top, left + width - gap, top + height - gap)
            if rng.random() < 0.3:
                draw.rounded_rectangle(box, gap, _near(rng, wall, spread))
            else:
                draw.rectangle(box, _near(rng, wall, spread))
    return _in_perspective(rng, _textured(rng, image, rng.uniform(0, 12)))


def grid(rng: random.Random, side: int, fonts: Sequence[Path]) -> Image.Image:
    """Railings, blinds, wire mesh and tiles: parallel lines in one, two or three directions."""
    image = Image.new("RGB", (side, side), _colour(rng))
    draw = ImageDraw.Draw(image)
    angle = rng.choice((0.0, 0.0, math.pi / 4, rng.uniform(0, math.pi)))
    for direction in range(rng.choice((1, 1, 2, 2, 3))):
        period = rng.uniform(2.5, 22) * SUPERSAMPLING
        ink, thick = _colour(rng), max(1, round(period * rng.uniform(0.12, 0.6)))
        _parallel_lines(draw, side, angle + direction * math.pi / rng.choice((2, 2, 3)), period, thick, ink)
    return _in_perspective(rng, image) if rng.random() < 0.8 else image


def text_page(rng: random.Random, side: int, fonts: Sequence[Path]) -> Image.Image:
    """Columns of small print, each with a font of its own."""
    paper, ink = _paper_and_ink(rng)
    image = Image.new("RGB", (side, side), paper)
    draw = ImageDraw.Draw(image)
    columns = rng.choice((1, 2, 2, 3))
    width = side / columns
    for column in range(columns):
        top = 0.0
        while top < side:
            points = rng.choice((7, 8, 9, 10, 11, 12, 14, 18, 24, 36)) * SUPERSAMPLING
            font = _font(rng, fonts, points)
            colour = ink if rng.random() < 0.8 else _colour(rng)
            for _ in range(rng.randint(1, 8)):
                line = _words(rng, int(2.2 * width / points))
                draw.text((column * width + points / 2, top), line, colour, font)
                top += points * rng.uniform(1.1, 1.4)
            top += points * rng.uniform(0, 1)
        draw.rectangle(((column + 1) * width - 3, 0, (column + 1) * width + width, side), paper)
    if rng.random() < 0.5:
        image = image.rotate(rng.uniform(-25, 25), Image.Resampling.BICUBIC, fillcolor=paper)
    return _in_perspective(rng, image) if rng.random() < 0.3 else image


def poster(rng: random.Random, side: int, fonts: Sequence[Path]) -> Image.Image:
    """Signs and labels: text of any size in boxes of any colour."""
    image = _gradient(rng, side)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(15, 40)):
        left, top = rng.uniform(-0.1, 0.9) * side, rng.uniform(-0.1, 0.9) * side
        points = int(rng.choice((8, 10, 14, 20, 30, 50, 90)) * SUPERSAMPLING)
        font, line = _font(rng, fonts, points), _words(rng, rng.randint(3, 18))
        box = draw.textbbox((left, top), line, font)
        margin = points * rng.uniform(0.1, 0.5)
        framed = (box[0] - margin, box[1] - margin, box[2] + margin, box[3] + margin)
        paper, ink = _paper_and_ink(rng)
        draw.rounded_rectangle(framed, margin * rng.random(), paper, ink, rng.choice((0, 1, 2, 5)))
        draw.text((left, top), line, ink, font)
    return image.rotate(rng.uniform(-15, 15), Image.Resampling.BICUBIC) if rng.random() < 0.3 else image


def textile(rng: random.Random, side: int, fonts: Sequence[Path]) -> Image.Image:
    """A weave: threads over and under each other in a repeating pattern, in coloured stripes, slightly bent."""
    period = rng.uniform(2.5, 9) * SUPERSAMPLING
    y, x = np.mgrid[0:side, 0:side].astype(np.float32)
    bend = rng.uniform(0, 8) * SUPERSAMPLING
    waves = [(rng.uniform(1, 4) * 2 * math.pi / side, rng.uniform(0, 6.3)) for _ in range(2)]
    x, y = x + bend * np.sin(y * waves[0][0] + waves[0][1]), y + bend * np.sin(x * waves[1][0] + waves[1][1])
    angle = rng.uniform(0, math.pi)
    u = (math.cos(angle) * x + math.sin(angle) * y) / period
    v = (-math.sin(angle) * x + math.cos(angle) * y) / period
    column, row = np.floor(u).astype(int), np.floor(v).astype(int)
    repeat = rng.choice((2, 2, 3, 4, 8))
    pattern = {
        "plain": (column + row) % 2,
        "twill": (column + row) % repeat < (repeat + 1) // 2,
        "herringbone": (np.where(column // 8 % 2 == 0, column, -column) + row) % 4 < 2,
        "basket": (column // 2 + row // 2) % 2,
    }
    over = pattern[rng.choice(list(pattern))].astype(bool)
    colours = np.array([_colour(rng) for _ in range(rng.randint(2, 4))], np.float32)
    stripes = np.array([rng.randrange(len(colours)) for _ in range(rng.choice((4, 8, 16, 32)))])
    warp, weft = colours[stripes[column % len(stripes)]], colours[stripes[row % len(stripes)]]
    depth = rng.uniform(0.2, 0.6)
    shade_warp = 1 - depth * np.abs(2 * (u - column) - 1) ** 2
    shade_weft = 1 - depth * np.abs(2 * (v - row) - 1) ** 2
    result = np.where(over[..., None], warp * shade_warp[..., None], weft * shade_weft[..., None])
    return Image.fromarray(result.clip(0, 255).astype(np.uint8))


def hatching(rng: random.Random, side: int, fonts: Sequence[Path]) -> Image.Image:
    """Shapes filled with parallel lines, as in engravings and maps."""
    paper, ink = _paper_and_ink(rng)
    image = Image.new("RGB", (side, side), paper)
    for _ in range(rng.randint(8, 24)):
        layer, mask = Image.new("RGB", (side, side), paper), Image.new("1", (side, side))
        shape = ImageDraw.Draw(mask)
        points = _polygon(rng, side)
        shape.polygon(points, 1)
        draw = ImageDraw.Draw(layer)
        period = rng.uniform(2, 14) * SUPERSAMPLING
        colour = ink if rng.random() < 0.7 else _colour(rng)
        thick = max(1, round(period * rng.uniform(0.1, 0.5)))
        angle = rng.uniform(0, math.pi)
        for turn in range(rng.choice((1, 1, 2))):
            _parallel_lines(draw, side, angle + turn * math.pi / 2, period, thick, colour)
        image.paste(layer, mask=mask)
        ImageDraw.Draw(image).line([*points, points[0]], colour, thick)
    return image


def line_art(rng: random.Random, side: int, fonts: Sequence[Path]) -> Image.Image:
    """Curves, circles, spokes and polygons with strokes of any width."""
    paper, ink = _paper_and_ink(rng)
    image = Image.new("RGB", (side, side), paper)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(20, 60)):
        thick = round(rng.choice((0.7, 1, 1.5, 2, 3, 6)) * SUPERSAMPLING)
        colour = ink if rng.random() < 0.6 else _colour(rng)
        x, y, radius = rng.uniform(0, side), rng.uniform(0, side), rng.uniform(0.02, 0.3) * side
        kind = rng.choice(("rings", "spokes", "polygon", "curve", "curve", "disc"))
        if kind == "rings":
            step = rng.uniform(3, 15) * SUPERSAMPLING
            for ring in range(int(radius / step)):
                size = step * (ring + 1)
                draw.ellipse((x - size, y - size, x + size, y + size), None, colour, thick)
        elif kind == "spokes":
            count = rng.randint(8, 90)
            for spoke in range(count):
                turn = 2 * math.pi * spoke / count
                draw.line((x, y, x + radius * math.cos(turn), y + radius * math.sin(turn)), colour, thick)
        elif kind == "disc":
            size = radius / 3
            draw.ellipse((x - size, y - size, x + size, y + size), colour, ink, thick)
        elif kind == "polygon":
            fill = _colour(rng) if rng.random() < 0.5 else None
            draw.polygon(_polygon(rng, side), fill, colour, thick)
        else:
            bends = [(rng.uniform(-2, 2) * 2 * math.pi, rng.uniform(0, 6.3), rng.uniform(0, radius)) for _ in range(3)]
            along = np.linspace(0, 1, 160)
            xs = x + (along - 0.5) * side * rng.uniform(0.2, 1)
            xs = xs + np.sum([a * np.cos(f * along + p) for f, p, a in bends], 0)
            ys = y + np.sum([a * np.sin(f * along * 1.3 + p) for f, p, a in bends], 0)
            draw.line([(float(a), float(b)) for a, b in zip(xs, ys, strict=True)], colour, thick, "curve")
    return image


def street(rng: random.Random, side: int, fonts: Sequence[Path]) -> Image.Image:
    """A street between façades that run to a vanishing point, with a road, signs and wires."""
    image = _gradient(rng, side, (_near(rng, (150, 180, 220), 40), _near(rng, (220, 225, 230), 30)))
    draw = ImageDraw.Draw(image)
    vanish_x, vanish_y = rng.uniform(0.35, 0.65) * side, rng.uniform(0.4, 0.65) * side
    road = _near(rng, (90, 90, 95), 30)
    draw.polygon([(0, side), (vanish_x, vanish_y), (side, side)], road)
    for stripe in range(12):
        near, far = 1 - 0.75**stripe, 1 - 0.75 ** (stripe + 0.5)
        low, high = side + (vanish_y - side) * near, side + (vanish_y - side) * far
        middle = side / 2
        wide_low, wide_high = 0.02 * side * (1 - near), 0.02 * side * (1 - far)
        x_low, x_high = middle + (vanish_x - middle) * near, middle + (vanish_x - middle) * far
        corners = [(x_low - wide_low, low), (x_low + wide_low, low), (x_high + wide_high, high)]
        draw.polygon([*corners, (x_high - wide_high, high)], (235, 235, 225))
    for edge in (0, side):
        first = rng.uniform(0.0, 0.1)
        while first < 0.75:
            last = min(first + rng.uniform(0.12, 0.3), 0.8)
            roof = rng.uniform(-0.6, 0.2) * side
            ends = ((first, roof), (first, side), (last, side), (last, roof))
            quad = [(edge + (vanish_x - edge) * part, level + (vanish_y - level) * part) for part, level in ends]
            _paste_quad(image, _windows(rng, side // 2), quad)
            first = last
    for _ in range(rng.randint(2, 6)):
        x, y = rng.uniform(0, side), rng.uniform(0.2, 0.8) * side
        paper, ink = _paper_and_ink(rng)
        font, line = _font(rng, fonts, int(rng.uniform(7, 26) * SUPERSAMPLING)), _words(rng, rng.randint(3, 12))
        box = draw.textbbox((x, y), line, font)
        draw.rectangle((box[0] - 9, box[1] - 9, box[2] + 9, box[3] + 9), paper, ink, 3)
        draw.text((x, y), line, ink, font)
    for _ in range(rng.randint(0, 6)):
        ends = (0, rng.uniform(0, 0.5) * side, side, rng.uniform(0, 0.5) * side)
        draw.line(ends, (30, 30, 30), rng.randint(1, 2 * SUPERSAMPLING))
    return image


SCENES: dict[str, Scene] = {
    "facade": facade,
    "bricks": bricks,
    "text": text_page,
    "street": street,
    "grid": grid,
    "textile": textile,
    "facade-2": facade,
    "poster": poster,
    "hatching": hatching,
    "line-art": line_art,
}


def _windows(rng: random.Random, side: int) -> Image.Image:
    """A flat façade: floors, windows with frames and glazing bars, sills, balconies and stripes."""
    wall = _near(rng, rng.choice(((170, 160, 150), (190, 120, 90), (210, 205, 195), (110, 115, 125))), 50)
    image = Image.new("RGB", (side, side), wall)
    draw = ImageDraw.Draw(image)
    floor, bay = (rng.uniform(8, 60) * SUPERSAMPLING for _ in range(2))
    share_x, share_y = rng.uniform(0.35, 0.92), rng.uniform(0.4, 0.9)
    glass, frame = _near(rng, (60, 80, 105), 50), _near(rng, (225, 225, 220), 60)
    bars_x, bars_y, line = rng.randint(0, 3), rng.randint(0, 3), max(1, round(rng.uniform(0.5, 2.2) * SUPERSAMPLING))
    if rng.random() < 0.4:
        joint, period = _near(rng, wall, 25), rng.uniform(3, 9) * SUPERSAMPLING
        for row in range(int(side / period) + 1):
            draw.rectangle((0, row * period, side, row * period + line / 2), joint)
    balcony = rng.random() < 0.3
    for row in range(int(side / floor) + 1):
        if rng.random() < 0.9:
            draw.rectangle((0, row * floor, side, row * floor + line), _near(rng, frame, 15))
        for column in range(int(side / bay) + 1):
            left, top = (column + (1 - share_x) / 2) * bay, (row + (1 - share_y) / 2) * floor
            right, bottom = left + share_x * bay, top + share_y * floor
            draw.rectangle((left, top, right, bottom), _near(rng, glass, 30), frame, line)
            for bar in range(1, bars_x + 1):
                x = left + (right - left) * bar / (bars_x + 1)
                draw.rectangle((x - line / 2, top, x + line / 2, bottom), frame)
            for bar in range(1, bars_y + 1):
                y = top + (bottom - top) * bar / (bars_y + 1)
                draw.rectangle((left, y - line / 2, right, y + line / 2), frame)
            if balcony:
                rail, period = _near(rng, (50, 50, 55), 20), rng.choice((2, 3, 4)) * SUPERSAMPLING
                for bar in range(int((right - left) / period) + 1):
                    x = left + bar * period
                    draw.rectangle((x, bottom - 0.35 * (bottom - top), x + line / 2, bottom), rail)
    return _textured(rng, image, rng.uniform(0, 6))


def _in_perspective(rng: random.Random, image: Image.Image) -> Image.Image:
    """Applies a random perspective; enlarges every side, so that no border is visible."""
    side = image.width
    corners = [(0, 0), (0, side), (side, side), (side, 0)]
    far = rng.choice((0.05, 0.4, 0.8)) * side
    moved: list[float] = []
    for x, y in corners:
        moved += [x + far * rng.random() / 2 * (1 - 2 * (x > 0)), y + rng.uniform(0, far / 2) * (1 - 2 * (y > 0))]
    return image.transform((side, side), Image.Transform.QUAD, moved, Image.Resampling.BICUBIC)


def _paste_quad(image: Image.Image, flat: Image.Image, quad: Sequence[tuple[float, float]]) -> None:
    """Pastes a flat image into a quadrilateral: top left, bottom left, bottom right, top right."""
    side = flat.width
    corners = [(0, 0), (0, side), (side, side), (side, 0)]
    rows, values = [], []
    for (x, y), (u, v) in zip(quad, corners, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    transform = np.linalg.solve(np.array(rows), np.array(values)).tolist()
    warped = flat.transform(image.size, Image.Transform.PERSPECTIVE, transform, Image.Resampling.BICUBIC)
    mask = Image.new("1", image.size)
    ImageDraw.Draw(mask).polygon(list(quad), 1)
    image.paste(warped, mask=mask)


def _parallel_lines(
    draw: ImageDraw.ImageDraw, side: int, angle: float, period: float, thick: int, colour: Colour
) -> None:
    along, across = (math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle))
    for index in range(int(1.5 * side / period) + 1):
        offset = index * period - 0.75 * side
        x, y = side / 2 + offset * across[0], side / 2 + offset * across[1]
        draw.line((x - side * along[0], y - side * along[1], x + side * along[0], y + side * along[1]), colour, thick)


def _polygon(rng: random.Random, side: int) -> list[tuple[float, float]]:
    x, y, radius = rng.uniform(0, side), rng.uniform(0, side), rng.uniform(0.1, 0.45) * side
    turns = sorted(rng.uniform(0, 2 * math.pi) for _ in range(rng.randint(3, 7)))
    return [(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns]


def _font(rng: random.Random, fonts: Sequence[Path], points: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.truetype(rng.choice(fonts), max(points, 6)) if fonts else ImageFont.load_default(max(points, 6))


def _words(rng: random.Random, letters: int) -> str:
    words, length = [], 0
    while length < max(letters, 1):
        word = "".join(rng.choices(_LETTERS, _WEIGHTS, k=min(rng.randint(1, 10), max(letters, 1))))
        style = rng.random()
        words.append(word.upper() if style < 0.15 else word.capitalize() if style < 0.4 else word)
        length += len(word) + 1
    return " ".join(words)


def _colour(rng: random.Random) -> Colour:
    if rng.random() < 0.35:
        grey = rng.randint(0, 255)
        return _near(rng, (grey, grey, grey), 10)
    return (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))


def _near(rng: random.Random, colour: Colour, spread: float) -> Colour:
    """Returns a colour like this one: mostly lighter or darker, a little of another hue."""
    light = rng.uniform(-spread, spread)
    red, green, blue = (min(max(round(part + light + rng.uniform(-spread, spread) / 4), 0), 255) for part in colour)
    return red, green, blue


def _paper_and_ink(rng: random.Random) -> tuple[Colour, Colour]:
    kind = rng.random()
    if kind < 0.5:
        return _near(rng, (245, 243, 238), 12), _near(rng, (25, 25, 30), 25)
    if kind < 0.65:
        return _near(rng, (25, 25, 30), 25), _near(rng, (240, 240, 235), 15)
    paper = _colour(rng)
    return paper, _near(rng, (255 - paper[0], 255 - paper[1], 255 - paper[2]), 40)


def _gradient(rng: random.Random, side: int, ends: tuple[Colour, Colour] | None = None) -> Image.Image:
    first, last = (np.array(colour, np.float32) for colour in (ends or (_colour(rng), _colour(rng))))
    share = np.linspace(0, 1, side, dtype=np.float32)[:, None, None]
    image = np.broadcast_to(first + (last - first) * share, (side, side, 3))
    return Image.fromarray(image.astype(np.uint8))


def _textured(rng: random.Random, image: Image.Image, strength: float) -> Image.Image:
    """Adds coarse and fine variations of brightness, as of plaster and stone."""
    noise = np.random.default_rng(rng.randrange(2**32))
    total = np.zeros((image.height, image.width), np.float32)
    for cells in (8, 32, 128, 384):
        coarse = noise.normal(0, strength, (cells, cells)).astype(np.float32)
        total += np.asarray(Image.fromarray(coarse).resize(image.size, Image.Resampling.BICUBIC))
    return Image.fromarray((np.asarray(image, np.float32) + total[..., None]).clip(0, 255).astype(np.uint8))


def _lit(rng: random.Random, image: Image.Image) -> Image.Image:
    """Lights the scene unevenly, and takes some of its contrast."""
    noise = np.random.default_rng(rng.randrange(2**32))
    coarse = noise.uniform(rng.uniform(0.4, 1), 1, (3, 3)).astype(np.float32)
    light = np.asarray(Image.fromarray(coarse).resize(image.size, Image.Resampling.BICUBIC))[..., None]
    darkest = rng.uniform(0, 40)
    lit = darkest + (np.asarray(image, np.float32) - darkest * np.asarray(image, np.float32) / 255) * light
    return Image.fromarray(lit.clip(0, 255).astype(np.uint8))
