"""The oldest pending connection is closed, first among those of the same address."""

from redline.stream.admission import PendingConnections


def test_one_address_ends_its_own_and_one_too_many_ends_the_oldest() -> None:
    waiting = PendingConnections[str](most=4, most_per_address=2)
    assert [waiting.add(name, "a") for name in ("a1", "a2")] == [None, None]
    assert waiting.add("b1", "b") is None
    assert waiting.add("a3", "a") == "a1"
    assert waiting.add("c1", "c") is None
    assert waiting.add("d1", "d") == "a2"
    waiting.remove("b1")
    waiting.remove("b1")
    assert waiting.add("a4", "a") is None
