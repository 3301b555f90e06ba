"""Splits the tables of words and facts, which the code contains as plain text."""


def words(text: str) -> list[str]:
    """Returns the words of a text, separated by white space.

    >>> words("cat dog")
    ['cat', 'dog']
    """
    return text.split()


def entries(text: str) -> list[str]:
    """Returns the entries of a text that are separated by | and may go over several lines.

    >>> entries("old house|farm")
    ['old house', 'farm']
    """
    return [entry.strip() for entry in " ".join(text.splitlines()).split("|")]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]
