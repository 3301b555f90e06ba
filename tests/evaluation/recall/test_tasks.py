"""The recall tasks ask for what is in the text, somewhere, and for nothing that could be guessed."""

import pytest
import torch

from goldens import check_golden
from redline.errors import ModelError
from redline.evaluation.recall import Mqar, Needle, Passkey, Recall, Sample, accuracy
from redline.evaluation.recall.passkey import KINDS
from redline.evaluation.recall.task import IGNORED
from redline.evaluation.recall.tasks import make_task

TASKS: list[Recall] = [Mqar(), Needle(), *[Passkey(kind) for kind in KINDS]]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_samples_have_their_size_and_repeat_by_seed(task: Recall) -> None:
    for length in (128, 301):
        one, again = task.sample(seeded(3), 4, length), task.sample(seeded(3), 4, length)
        assert one.tokens_BS.shape == one.targets_BS.shape == (4, length)
        assert torch.equal(one.tokens_BS, again.tokens_BS) and torch.equal(one.targets_BS, again.targets_BS)
        assert not torch.equal(one.tokens_BS, task.sample(seeded(4), 4, length).tokens_BS)
        assert one.tokens_BS.min() >= 0 and one.tokens_BS.max() < task.vocabulary
        assert ((one.targets_BS != IGNORED).sum(1) > 0).all()


def test_options_go_down_to_one() -> None:
    assert make_task("word", {"answer_bytes": 1}) == Passkey("word", answer_bytes=1)
    assert make_task("mqar", {"pairs": 1}) == Mqar(pairs=1)


def test_a_pair_precedes_its_query() -> None:
    sample = Mqar(symbols=20, pairs=4, questions=9).sample(seeded(), 50, 40)
    for tokens, targets in zip(sample.tokens_BS.tolist(), sample.targets_BS.tolist(), strict=True):
        pairs = dict(zip(tokens[0:8:2], tokens[1:8:2], strict=True))
        assert len(pairs) == 4 and all(1 <= key < 10 <= value for key, value in pairs.items())
        asked = [place for place in range(40) if targets[place] != IGNORED]
        assert len(asked) == 9 and min(asked) >= 8
        assert all(targets[place] == pairs[tokens[place]] for place in asked)
        assert all(tokens[place] == 0 for place in range(8, 40) if place not in asked)


def test_needles_are_anywhere_and_all_queried() -> None:
    task = Needle()
    sample = task.sample(seeded(), 200, 60)
    places = []
    for tokens, targets in zip(sample.tokens_BS.tolist(), sample.targets_BS.tolist(), strict=True):
        hidden = {tokens[i]: tokens[i + 1] for i in range(51) if 16 <= tokens[i] < 19}
        places += [i for i in range(51) if 16 <= tokens[i] < 19]
        assert set(hidden) == {16, 17, 18} and all(value < 16 for value in hidden.values())
        asked = [i for i in range(60) if targets[i] != IGNORED]
        assert asked == [52, 55, 58] and {tokens[i] for i in asked} == {16, 17, 18}
        assert all(targets[i] == hidden[tokens[i]] == tokens[i + 1] and tokens[i - 1] == 19 for i in asked)
    assert min(places) < 3 and max(places) > 46


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_occurs_once_and_is_queried_at_the_end(kind: str) -> None:
    sample = Passkey(kind).sample(seeded(), 20, 400)
    for tokens, targets in zip(sample.tokens_BS, sample.targets_BS, strict=True):
        text = bytes(tokens.tolist()).decode("ascii")
        answer = bytes(targets[targets != IGNORED].tolist()).decode("ascii")
        assert len(answer) == 7 and (answer.isalpha() if kind == "word" else answer.isdigit())
        assert text.count(f"is {answer}. ") == 1 and text.endswith(answer[:-1])
        assert (targets != IGNORED).nonzero().flatten().tolist() == list(range(393, 400))


def test_accuracy_counts_only_queried_tokens() -> None:
    sample = Sample(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[IGNORED, 2, 1, 0]]))

    def predict(tokens: torch.Tensor) -> torch.Tensor:
        return torch.eye(3)[torch.tensor([[1, 2, 1, 1]])]

    assert accuracy(predict, sample) == pytest.approx(2 / 3)
    assert accuracy(lambda tokens: predict(tokens) * torch.nan, sample) == 0


def test_dimensions_that_do_not_fit_raise() -> None:
    with pytest.raises(ModelError, match="6 pairs and 24 questions need 36 tokens, not 35"):
        Mqar().sample(seeded(), 1, 35)
    with pytest.raises(ModelError, match="3 needles and their questions need 15 tokens"):
        Needle().sample(seeded(), 1, 14)
    assert Needle(1, 1, 1).sample(seeded(), 1, 5).tokens_BS.shape == (1, 5)  # the smallest task and text
    for option in ("keys", "values", "noises"):
        with pytest.raises(ModelError, match=f"{option} = 0 of the recall task needle must be .*at least 1"):
            make_task("needle", {option: 0})
    with pytest.raises(ModelError, match="a needle and its question need"):
        Passkey().sample(seeded(), 1, 50)
    with pytest.raises(ModelError, match="unknown needle 'uuid': use one of passkey, number, word"):
        Passkey("uuid")


def test_the_samples_of_a_seed_never_change() -> None:
    """Scores of different versions are compared with each other."""
    lines = []
    for task in TASKS:
        sample = task.sample(seeded(5), 2, 120)
        lines += [
            f"{task}: {tokens} asks {targets[targets != IGNORED].tolist()}"
            for tokens, targets in zip(sample.tokens_BS.tolist(), sample.targets_BS, strict=True)
        ]
    check_golden("recall_tasks.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_text_has_no_filler(kind: str) -> None:
    """The last byte of the answer is a target alone."""
    story = Passkey(kind).story(seeded(3))
    length = len(story.needle + story.question + story.answer) - 1
    sample = Passkey(kind).sample(seeded(3), 1, length)
    assert bytes(sample.tokens_BS[0].tolist()).decode() == (story.needle + story.question + story.answer)[:-1]
    with pytest.raises(ModelError, match=f"need {length} tokens, not {length - 1}"):
        Passkey(kind).sample(seeded(3), 1, length - 1)
