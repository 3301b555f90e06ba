"""The slot bank: what it takes in, merges, throws out, and how it is reduced."""

import pytest
import torch
from torch import Tensor

from redline.models.memory.slot_bank import SlotBank

CPU = torch.device("cpu")


def unit(*directions: int) -> Tensor:
    """Keys of one head, each along one of eight axes: (1, C, 1, 8)."""
    return torch.eye(8)[list(directions)][None, :, None]


def written(bank: SlotBank, directions: list[int], scores: list[float], **options: object) -> SlotBank:
    settings = {"ratio": 1.0, "adaptive": False, "threshold": 0.9, **options}
    keys = unit(*directions)
    return bank.with_written(keys, 10 * keys, torch.tensor([scores]), **settings)


def empty(slots: int) -> SlotBank:
    return SlotBank.empty(1, slots, 1, 8, CPU, torch.float32)


def held(bank: SlotBank) -> dict[int, tuple[float, float]]:
    """Direction of each filled slot, with its score and mass."""
    return {
        int(bank.key_BMHD[0, i, 0].argmax()): (bank.score_BM[0, i].item(), bank.mass_BM[0, i].item())
        for i in range(bank.slots)
        if bank.filled_BM[0, i]
    }


def test_only_the_best_share_is_written() -> None:
    bank = written(empty(8), [0, 1, 2, 3, 4], [0.1, 3.0, -1.0, 2.0, 1.0], ratio=0.5)
    assert held(bank) == {1: (3.0, 1.0), 3: (2.0, 1.0), 4: (1.0, 1.0)}
    assert bank.writes_B.item() == 3 and bank.merges_B.item() == bank.evictions_B.item() == 0


@pytest.mark.parametrize(("ratio", "count", "kept"), [(0.07, 100, 7), (0.55, 100, 55), (0.28, 25, 7), (0.281, 25, 8)])
def test_the_number_of_writes_follows_the_ratio(ratio: float, count: int, kept: int) -> None:
    """Rounded up, and not because a product is a little more than it should be."""
    keys = torch.eye(count)[None, :, None]
    bank = SlotBank.empty(1, count, 1, count, CPU, torch.float32)
    assert bank.with_written(keys, keys, torch.rand(1, count), ratio, False, 0.9).filled_BM.sum() == kept


def test_adaptive_writes_what_scores_above_one_half_and_no_more_than_the_share() -> None:
    assert set(held(written(empty(8), [0, 1, 2, 3], [0.1, 3.0, -1.0, -2.0], adaptive=True))) == {0, 1}
    many = written(empty(8), [0, 1, 2, 3], [0.1, 3.0, 1.0, 2.0], adaptive=True, ratio=0.25)
    assert set(held(many)) == {1}


def test_a_full_bank_throws_out_the_lowest_score_and_never_a_higher_one() -> None:
    bank = written(empty(2), [0, 1], [1.0, 2.0])
    bank = written(bank, [2, 3], [1.5, 0.5])
    assert held(bank) == {1: (2.0, 1.0), 2: (1.5, 1.0)}
    assert bank.writes_B.item() == 3 and bank.evictions_B.item() == 1


def test_similar_keys_are_merged_by_mass() -> None:
    bank = written(empty(4), [0, 0, 0, 1], [1.0, 3.0, 2.0, 0.5])
    assert held(bank) == {0: (3.0, 3.0), 1: (0.5, 1.0)} and bank.merges_B.item() == 2
    near = torch.tensor([0.95, 0.05, 0, 0, 0, 0, 0, 0])[None, None, None]
    more = bank.with_written(near, torch.zeros_like(near), torch.zeros(1, 1), 1.0, False, 0.9)
    slot = int(more.mass_BM[0].argmax())
    torch.testing.assert_close(more.key_BMHD[0, slot, 0, :2], torch.tensor([3.95 / 4, 0.05 / 4]))
    torch.testing.assert_close(more.value_BMHD[0, slot, 0, 0], torch.tensor(7.5))


def test_an_empty_slot_gets_no_attention_and_mass_counts() -> None:
    bank = written(empty(3), [0, 0], [100.0, 100.0])
    assert torch.equal(bank.bias_BM.isinf(), torch.tensor([[False, True, True]]))
    torch.testing.assert_close(bank.bias_BM[0, 0], torch.tensor(2.0).log())


def test_reading_moves_usage_as_one_query_after_the_other_would() -> None:
    bank, attention = written(empty(3), [0, 1, 2], [1.0, 1.0, 1.0]), torch.rand(1, 5, 3)
    at_once, one_by_one = bank.with_read(attention), bank
    for token in range(5):
        one_by_one = one_by_one.with_read(attention[:, token : token + 1])
    torch.testing.assert_close(at_once.usage_BM, one_by_one.usage_BM)
    assert at_once.age_BM.tolist() == [[5, 5, 5]] and at_once.usage_BM.min() > 0
    again = written(at_once, [4], [9.0])
    assert again.age_BM.min() == 0 and again.usage_BM.min() == 0


def test_reducing_drops_empty_slots_first_and_then_merges_the_most_similar() -> None:
    bank = written(empty(5), [0, 1, 2], [1.0, 2.0, 3.0])
    assert held(bank.reduced_to(3)) == held(bank)
    close = bank.key_BMHD.clone()
    index = [int(bank.key_BMHD[0, i, 0].argmax()) for i in range(3)]
    close[0, index.index(2), 0] = torch.eye(8)[0] * 0.9 + torch.eye(8)[2] * 0.3
    reduced = SlotBank(**{**bank.__dict__, "key_BMHD": close}).reduced_to(2)
    assert sorted(reduced.mass_BM[0].tolist()) == [1, 2] and reduced.merges_B.item() == 1
    assert held(reduced)[0] == (3.0, 2.0)


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    keys, scores = torch.randn(3, 6, 2, 4), torch.randn(3, 6)
    banks = SlotBank.empty(3, 4, 2, 4, CPU, torch.float32).with_written(keys, -keys, scores, 0.7, True, 0.5)
    for row in range(3):
        one = SlotBank.empty(1, 4, 2, 4, CPU, torch.float32)
        part = slice(row, row + 1)
        one = one.with_written(keys[part], -keys[part], scores[part], 0.7, True, 0.5)
        for name, tensor in one.__dict__.items():
            torch.testing.assert_close(getattr(banks, name)[part], tensor)
    reduced = banks.reduced_to(2)
    torch.testing.assert_close(reduced.mass_BM.sum(1), banks.mass_BM.sum(1))


def test_two_slots_are_merged_by_their_mass_and_the_others_stay() -> None:
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]]).view(1, 3, 1, 2)
    value = torch.tensor([[4.0, 0.0], [7.0, 7.0], [0.0, 8.0]]).view(1, 3, 1, 2)
    mass, usage = torch.tensor([[3.0, 1.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.3]])
    score, age = torch.tensor([[1.0, 2.0, 5.0]]), torch.tensor([[9.0, 8.0, 7.0]])
    count = torch.zeros(1, dtype=torch.int64)
    bank = SlotBank(key, value, score, mass, usage, age, count, count, count).reduced_to(2)
    assert bank.value_BMHD[0, :, 0].tolist() == [[3.0, 2.0], [7.0, 7.0]]
    torch.testing.assert_close(bank.key_BMHD[0, 0, 0], torch.tensor([1.0, 0.025]))
    assert bank.mass_BM[0].tolist() == [4.0, 1.0] and bank.usage_BM[0].tolist() == pytest.approx([0.4, 0.2])
    assert bank.score_BM[0].tolist() == [5.0, 2.0] and bank.age_BM[0].tolist() == [9.0, 8.0]
    assert bank.merges_B.item() == 1
