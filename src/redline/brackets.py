"""Splits the one-line form of plans and rungs, in which separators inside brackets belong to the options."""


def split_outside_brackets(text: str, separators: str) -> list[str]:
    """`a(b, c), d` at `,` -> [`a(b, c)`, ` d`]; every part is given, empty ones too."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char in separators and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]
