"""The evaluation of a chat model: right answers count as a whole, and the control fails if it means anything."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from redline.datasets.conversations import ASKED, Message, question
from redline.errors import RedlineError
from redline.evaluation.talk import Answered, evaluate_answers, is_meaningful, rows_of, total

TOPICS = ["arithmetic", "memory", "spelling"]


def oracle(samples: int, wrong: frozenset[int] = frozenset()) -> object:
    """Returns an answerer that knows the answers, and gets those numbers of each topic wrong."""
    known = {
        str(asked.messages): (number, asked.answer)
        for topic in ASKED
        for number, asked in ((number, question(topic, number)) for number in range(samples))
    }

    def answer(conversations: Sequence[list[Message]]) -> list[str]:
        found = [known[str(messages)] for messages in conversations]
        return [" nonsense" if number in wrong else f" {text}\n" for number, text in found]

    return answer


def test_accuracy_counts_whole_answers() -> None:
    found = evaluate_answers(oracle(10, frozenset({3, 7})), TOPICS, samples=10)  # type: ignore[arg-type]
    rows = rows_of(found)
    assert [(row.topic, row.accuracy, row.control, row.asked) for row in rows] == [
        (topic, 0.8, 0.0, 10) for topic in TOPICS
    ]
    assert total(found).accuracy == pytest.approx(0.8) and total(found).asked == 30 and is_meaningful(total(found))


def test_a_constant_answer_scores_nothing() -> None:
    found = evaluate_answers(lambda asked: ["42" for _ in asked], TOPICS, samples=10)
    assert total(found).accuracy == total(found).control == 0.0


def test_an_evaluation_whose_control_is_right_is_meaningless() -> None:
    found = evaluate_answers(oracle(10), TOPICS, samples=10)  # type: ignore[arg-type]
    assert is_meaningful(total(found))
    leaked = [replace(one, control=one.question.answer) if number < 3 else one for number, one in enumerate(found)]
    assert not is_meaningful(total(leaked))
    assert Answered(found[0].question, "x", "y").is_right is False


def test_unknown_topics_and_too_few_questions_are_refused() -> None:
    with pytest.raises(RedlineError, match="unknown topic 'weather': use one of arithmetic, comparing"):
        evaluate_answers(lambda asked: [], ["weather"])
    with pytest.raises(RedlineError, match="samples must be at least 2"):
        evaluate_answers(lambda asked: [], ["facts"], samples=1)
