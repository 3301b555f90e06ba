"""Tests document borders and positions against counting them one by one."""

import pytest
import torch

from redline.errors import ModelError
from redline.nn.packing import Packing


def test_borders_and_positions_agree_with_hand_counts() -> None:
    numbers = torch.randint(3, (4, 57))
    packing = Packing.of(numbers)
    borders: list[int] = []
    for row in range(4):
        position = 0
        for column in range(57):
            if column == 0 or numbers[row, column] != numbers[row, column - 1]:
                borders.append(row * 57 + column)
                position = 0
            assert packing.positions_BS[row, column] == position
            position += 1
    found = packing.borders.tolist()
    assert found[: len(borders)] == borders and set(found[len(borders) :]) == {4 * 57}
    assert packing.borders.dtype == torch.int32 and len(found) > len(borders)
    # Few sizes, so that a compiled model is rarely recompiled.
    assert (len(found) - 1).bit_count() == 1


def test_an_index_that_recurs_is_another_document() -> None:
    same = Packing.of(torch.tensor([[1, 1, 2, 1]])).same_BSS[0]
    assert same.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_borders_are_padded_to_powers_of_two() -> None:
    for count in (1, 15, 16, 17, 31, 32, 200):
        packing = Packing.of(torch.arange(count)[None])
        assert packing.borders[count:].eq(count).all() and packing.borders[:count].tolist() == list(range(count))


def test_is_whole_follows_from_the_size_of_borders() -> None:
    for rows in (1, 2, 15, 16, 17, 31, 64):
        whole = Packing.of(torch.full((rows, 5), 3))
        assert whole.is_whole and whole.borders.tolist() == list(range(0, 5 * rows + 1, 5))
        assert whole.positions_BS.tolist() == [list(range(5))] * rows
        cut = torch.full((rows, 5), 3)
        cut[rows // 2, 2:] = 4
        assert not Packing.of(cut).is_whole


def test_invalid_documents_are_refused() -> None:
    for wrong in (torch.zeros(4, dtype=torch.long), torch.zeros(2, 4)):
        with pytest.raises(ModelError, match="documents_BS must be integers of shape"):
            Packing.of(wrong)
