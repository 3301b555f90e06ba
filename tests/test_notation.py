"""Durations, sizes and rates as people read and write them."""

import pytest

from redline.errors import RedlineError
from redline.notation import (
    format_bytes,
    format_megapixels,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_seconds,
    parse_server_url,
    split_outside_brackets,
)


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (2304, "0.0023 megapixels"),
        (4 * 10**5, "0.4 megapixels"),
        (143_900_000, "144 megapixels"),
        (999_800_000, "1,000 megapixels"),
        (2_240_000_000, "2,240"),
    ],
)
def test_megapixels_of_few_and_of_many(pixels: int, said: str) -> None:
    assert format_megapixels(pixels).startswith(said)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (2.5e-6, "2.5 µs"),
        (0.9999e-3, "1000 µs"),
        (1e-3, "1 ms"),
        (-0.016, "-16 ms"),
        (1.0, "1 s"),
        (119.4, "119 s"),
        (120.0, "2 min"),
        (7199.0, "120 min"),
        (7200.0, "2 h"),
        (float("nan"), "n/a"),
    ],
)
def test_durations_in_the_unit_that_reads_best(seconds: float, said: str) -> None:
    assert format_seconds(seconds) == said


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (2**10, "1 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (-(2**29), "-512 MiB"),
        (999.7 * 2**20, "1000 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (2**30, "1 GiB"),
        (3 * 2**40, "3 TiB"),
    ],
)
def test_bytes_in_the_unit_that_reads_best(size: float, said: str) -> None:
    assert format_bytes(size) == said


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (5e3, "5 KB/s"),
        (1e6, "1 MB/s"),
        (2e9, "2 GB/s"),
        (999.9e9, "1000 GB/s"),
        (7.84e14, "784 TB/s"),
        (1.4e15, "1.4 PB/s"),
    ],
)
def test_rates_in_the_prefix_that_reads_best(rate: float, said: str) -> None:
    assert format_rate(rate, "B/s") == said


def test_what_people_write_is_read() -> None:
    assert parse_seconds("16ms") == pytest.approx(0.016) and parse_seconds(" 1.5 H ") == 5400
    assert parse_seconds(".5m") == parse_seconds("0.5min") == 30
    assert (parse_bytes("8GiB"), parse_bytes("8gb"), parse_bytes("2KiB"), parse_bytes("3 MiB")) == (
        2**33,
        8 * 10**9,
        2048,
        3 * 2**20,
    )
    assert (parse_bytes("1TiB"), parse_bytes("1KB"), parse_bytes("1MB")) == (2**40, 1000, 10**6)


@pytest.mark.parametrize("text", ["", "5", "ms", "5 parsecs", "-5s", "1.s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(RedlineError, match="is not a duration: write a number and one of us, "):
        parse_seconds(text)
    with pytest.raises(RedlineError, match="'0GiB' is not a size above zero"):
        parse_bytes("0GiB")


def test_separators_inside_brackets_belong_to_the_options() -> None:
    assert split_outside_brackets("a(b, c), d", ",") == ["a(b, c)", " d"]
    assert split_outside_brackets("a[1, (2, 3)],,", ",") == ["a[1, (2, 3)]", "", ""]
    assert split_outside_brackets("a+b-c", "+-") == ["a", "b", "c"]
    assert split_outside_brackets("", ",") == [""]


def test_addresses_of_servers() -> None:
    for text in ("127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1", "127.0.0.1:8000/v1/"):
        assert parse_server_url(text) == "http://127.0.0.1:8000"
    assert parse_server_url("https://[::1]/proxy/v1") == "https://[::1]/proxy"
    for text in (
        "",
        "ftp://x",
        "http://",
        "http://a b",
        "http://x:99999",
        "x:0",
        "http://\n",
        "http://x?key=1",
        "http://é",
    ):
        with pytest.raises(RedlineError, match="not the address of a server"):
            parse_server_url(text)
