"""Index tensors for padding."""

from redline.video.padding_index import reflected, wrapped


def test_a_frame_is_mirrored_at_its_outermost_pixels_again_and_again() -> None:
    assert reflected(-4, 8, 3).tolist() == [0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1]
    assert reflected(-2, 4, 2).tolist() == [0, 1, 0, 1, 0, 1]
    assert reflected(-2, 3, 1).tolist() == [0, 0, 0, 0, 0]


def test_a_frame_goes_on_at_its_other_side() -> None:
    assert wrapped(-2, 5, 3).tolist() == [1, 2, 0, 1, 2, 0, 1]
