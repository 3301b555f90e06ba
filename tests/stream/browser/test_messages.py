"""Messages of a page are parsed, or refused with one sentence."""

import json
import random

import pytest

from redline.stream.browser.messages import Change, MessageError, Offer, Ping, Stop, read


def test_messages_are_read() -> None:
    assert read('{"type": "ping", "sent": 12.5}') == Ping(12.5)
    assert read('{"type": "stop"}') == Stop()
    assert read('{"type": "settings", "settings": {"strength": 0.25, "control": [1, 2.5]}}') == Change(
        {"strength": 0.25, "control": [1, 2.5]}
    )
    assert read('{"type": "settings", "settings": {"prompt": "a bridge"}}') == Change({"prompt": "a bridge"})
    assert read('{"type": "offer", "sdp": "v=0", "lines": ["output"]}') == Offer("v=0", ("output",))


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", "null", "3", '"text"', "{}", '{"type": "shout"}', '{"type": ["offer"]}', '{"type": "offer"}',
     '{"type": "offer", "sdp": 3, "lines": ["output"]}', '{"type": "offer", "sdp": "", "lines": []}',
     '{"type": "offer", "sdp": "", "lines": ["sound"]}', '{"type": "offer", "sdp": "", "lines": ["output", "output"]}',
     '{"type": "offer", "sdp": "", "lines": [["output"]]}', '{"type": "ping"}', '{"type": "ping", "sent": "now"}',
     '{"type": "ping", "sent": NaN}', '{"type": "ping", "sent": true}', '{"type": "settings"}',
     '{"type": "settings", "settings": {}}', '{"type": "settings", "settings": {"strength": "much"}}',
     '{"type": "settings", "settings": {"strength": Infinity}}', '{"type": "settings", "settings": {"prompt": null}}',
     '{"type": "settings", "settings": {"control": [null]}}',
     '{"type": "settings", "settings": {"control": [1e999]}}', '{"type": "settings", "settings": {"seed": {}}}',
     '{"type": "settings", "settings": {"control": [1' + "0" * 400 + "]}}", "[" * 60_000, "9" * 60_000,
     '{"type": "' + "x" * 1000 + '"}'],
)  # fmt: skip
def test_other_messages_get_one_short_sentence(text: str) -> None:
    with pytest.raises(MessageError) as caught:
        read(text)
    said = str(caught.value)
    assert said.endswith(".") and len(said) < 160 and "\n" not in said


def test_no_mangled_message_raises_anything_else() -> None:
    good = json.dumps({"type": "offer", "sdp": "v=0\r\n", "lines": ["camera", "output"]})
    rng = random.Random()
    for _ in range(2000):
        mangled = list(good)
        for _ in range(rng.randint(1, 4)):
            mangled[rng.randrange(len(mangled))] = chr(rng.choice([rng.randrange(32, 127), rng.randrange(1, 0xD800)]))
        try:
            read("".join(mangled))
        except MessageError as error:
            assert str(error).endswith(".")
