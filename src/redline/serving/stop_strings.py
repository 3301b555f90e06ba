"""Finds stop strings in a text that arrives in pieces."""


class StopStrings:
    """Returns the text before the first stop string, piece by piece.

    The end of the text is held back as long as it may be the beginning of a stop string.

    >>> stops = StopStrings(("END",))
    >>> stops.push("the E"), stops.push("N"), stops.push("x"), stops.push(" END of")
    ('the ', '', 'ENx', ' ')
    >>> stops.found
    'END'
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        # All prefixes of the stop strings, except the complete stop strings.
        self._beginnings = {stop[:end] for stop in stops for end in range(1, len(stop))}
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Adds a piece, and returns the text that cannot be a part of a stop string any more."""
        if self.found is not None or not self._stops:
            return piece if self.found is None else ""
        text = self._held + piece
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            self._held = ""
            return text[:place]
        held = next((size for size in range(min(self._longest - 1, len(text)), 0, -1) if self._begins(text, size)), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Returns the text that was held back. Call this when the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _begins(self, text: str, size: int) -> bool:
        return text[-size:] in self._beginnings
