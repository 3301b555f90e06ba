"""Separators inside brackets belong to the options."""

from redline.brackets import split_outside_brackets


def test_every_part_is_given() -> None:
    assert split_outside_brackets("a(b, c), d", ",") == ["a(b, c)", " d"]
    assert split_outside_brackets("a[1, (2, 3)],,", ",") == ["a[1, (2, 3)]", "", ""]
    assert split_outside_brackets("a+b-c", "+-") == ["a", "b", "c"]
    assert split_outside_brackets("", ",") == [""]
