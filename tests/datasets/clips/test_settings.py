"""The settings of training clips: the limits of each."""

import pytest

from redline.datasets.clips import ClipSettings
from redline.errors import RedlineError
from redline.files.config_fields import decode


def settings(**values: float) -> ClipSettings:
    return decode(ClipSettings, {"photos": "photos", "frame_px": 8, "world_px": 8, **values}, "under [data]")


@pytest.mark.parametrize(
    ("names", "allowed", "refused"),
    [
        (("still", "objects", "cuts"), (0.0, 1.0), (-0.01, 1.01)),
        (("dark", "cast"), (0.0, 0.99), (-0.01, 1.0)),
        (("pan_px", "zoom", "turn", "noise", "blur_px"), (0.0,), (-0.1,)),
        (("frame_px", "world_px"), (8,), (7,)),
        (("batch",), (1,), (0,)),
        (("quality",), (1, 100), (0, 101)),
    ],
)
def test_settings_have_limits(names: tuple[str, ...], allowed: tuple[float, ...], refused: tuple[float, ...]) -> None:
    for name in names:
        assert all(settings(**{name: value}) for value in allowed)
        for value in refused:
            with pytest.raises(RedlineError, match=f"{name} = {value} .*must be"):
                settings(**{name: value})
