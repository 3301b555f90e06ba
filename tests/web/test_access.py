"""Only this machine or clients with the key get access, and only from the page itself."""

import pytest

from redline.errors import RedlineError
from redline.web.access import Access, is_loopback, reachable_hosts, urls

KEY = "correct horse battery"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.3.2.1", "LOCALHOST"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host) and Access(host).why_not_key(None, None) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "camera.example", "localhost.evil.example", ""])
def test_any_other_host_needs_a_key(host: str) -> None:
    with pytest.raises(RedlineError, match=r"can be reached from other machines: give a --key, .*\.$"):
        Access(host)
    with pytest.raises(RedlineError, match=r"^the key must have at least 12 characters, not 5\.$"):
        Access(host, "12345")
    Access(host, KEY)


def test_a_key_that_is_not_utf_8_is_refused() -> None:
    """Python represents such bytes of arguments and the environment as surrogates."""
    for key in ("abcdefghijkl\udcff\udcfe", "\ud800" * 12):
        with pytest.raises(RedlineError, match=r"^the key is not valid UTF-8: .*\.$"):
            Access("127.0.0.1", key)
    Access("127.0.0.1", "ключ для зрителей")


@pytest.mark.parametrize(
    ("key", "token"), [(None, None), ("", ""), (KEY[:-1], None), (KEY + "x", None), ("é\udcff", "\udcff"), (None, KEY)]
)
def test_a_wrong_key_is_refused_even_on_loopback(key: str | None, token: str | None) -> None:
    access = Access("127.0.0.1", KEY)
    assert access.why_not_key(key, token).startswith("the key is missing or wrong")
    assert access.why_not_key(KEY, token) == access.why_not_key(key, access.token) == ""


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or False)
    Access("127.0.0.1", KEY).why_not_key("guess", "other")
    assert [a for a, _ in compared] == [b"guess", b"other"]


def test_a_key_is_not_printed() -> None:
    access = Access("0.0.0.0", KEY)
    assert KEY not in repr(access) and access.token not in repr(access)


@pytest.mark.parametrize("host", ["127.0.0.1:8181", "localhost:8181", "[::1]:8181", "localhost"])
def test_a_name_of_this_machine_is_served(host: str) -> None:
    assert Access("127.0.0.1").why_not_host(host) == ""


@pytest.mark.parametrize(
    "host",
    ["evil.example:8181", "127.0.0.1.evil.example", "192.168.1.7:8181", "", None, "[::1", "localhost@evil.example"],
)
def test_a_name_that_was_made_to_point_here_is_refused(host: str | None) -> None:
    assert Access("127.0.0.1").why_not_host(host).endswith(".")


def test_an_open_host_takes_addresses_and_the_names_it_was_given() -> None:
    access = Access("0.0.0.0", KEY, names=("Studio.example",))
    for host in ("192.168.1.7:8181", "studio.example", "[fd00::1]:8181", "localhost:8181"):
        assert access.why_not_host(host) == "", host
    assert access.why_not_host("evil.example:8181")


@pytest.mark.parametrize(
    "origin",
    [None, "null", "", "http://evil.example", "http://127.0.0.1:8182", "http://127.0.0.1", "file://127.0.0.1:8181",
     "http://127.0.0.1:8181.evil.example", "http://127.0.0.1:8181/"],
)  # fmt: skip
def test_another_origin_is_refused(origin: str | None) -> None:
    assert Access("127.0.0.1").why_not_origin(origin, "127.0.0.1:8181").endswith(".")


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8181", "https://127.0.0.1:8181", "http://LOCALHOST:8181"])
def test_the_own_origin_is_taken(origin: str) -> None:
    host = origin.partition("://")[2].lower()
    assert Access("127.0.0.1").why_not_origin(origin, host) == ""


def test_a_server_that_listens_everywhere_is_shown_at_addresses_that_others_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(0, 0, 0, "", (host, 0)) for host in ("127.0.1.1", "192.168.1.7", "192.168.1.7", "169.254.3.3")]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: found)
    hosts = reachable_hosts("0.0.0.0")
    assert hosts[-1] == "192.168.1.7" and len(hosts) <= 2 and not any(host.startswith("127.") for host in hosts)
    assert reachable_hosts("127.0.0.1") == ("127.0.0.1",) and reachable_hosts("studio.example") == ("studio.example",)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: found[:1])
    monkeypatch.setattr("socket.socket.connect", _no_network)
    assert reachable_hosts("") == ("127.0.0.1",), "there is no network"
    assert urls("http", "::", 8, "/a", "b&c") == ("http://[::1]:8/a?key=b%26c",)


def _no_network(*_: object) -> None:
    raise OSError(101, "Network is unreachable")
