"""Where the tokens of one call stand: documents, positions and parts."""

import pytest
import torch

from redline.errors import ModelError
from redline.models.memory import TitanConfig
from redline.models.memory.token_positions import TokenPositions
from redline.nn.packing import Packing

CONFIG = TitanConfig(vocabulary=9, width=16, layers=1, heads=2)
TOKENS = torch.zeros(2, 5, dtype=torch.int64)


def test_positions_count_anew_in_every_document() -> None:
    numbers = torch.tensor([[7, 7, 3, 3, 3], [1, 2, 2, 1, 1]])
    for documents in (numbers, Packing.of(numbers)):
        positions = TokenPositions.whole(TOKENS, documents, CONFIG)
        assert positions.positions_BS.tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 0, 1]]
        assert positions.documents_BS is not None
        apart = positions.documents_BS[:, 1:] != positions.documents_BS[:, :-1]
        assert apart.tolist() == [[False, True, False, False], [True, False, True, False]]
        assert positions.block_masks is None
    assert TokenPositions.whole(TOKENS, None, CONFIG).positions_BS.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_the_next_tokens_of_each_sequence() -> None:
    positions = TokenPositions.after(torch.tensor([3, 0]), 4, CONFIG, (2,))
    assert positions.positions_BS.tolist() == [[3, 4, 5, 6], [0, 1, 2, 3]] and positions.segment_starts == (2,)
    part = positions.part(1, 3)
    assert part.positions_BS.tolist() == [[4, 5], [1, 2]] and part.rotation.rows_BS.tolist() == [[1, 2], [5, 6]]


@pytest.mark.parametrize("wrong", [TOKENS.float(), TOKENS[0], TOKENS[:, 1:]], ids=["floats", "one row", "too few"])
def test_other_documents_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ModelError, match="documents"):
        TokenPositions.whole(TOKENS, wrong, CONFIG)
