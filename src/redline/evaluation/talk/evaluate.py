"""Scores a chat model on held-out questions that have one right answer, with a control that must fail.

The control compares each right answer with the model's answer to another question of the topic. If the control finds
more than a few of them equal, the right answers do not depend enough on the questions, and the accuracy means nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redline.datasets.conversations import ASKED, Message, Question, question
from redline.errors import RedlineError

Answerer = Callable[[Sequence[list[Message]]], list[str]]
# The largest share of questions for which the control may find the right answer.
_CONTROL_LIMIT = 0.05


@dataclass(frozen=True)
class Answered:
    """A question with the model's answer; `control` is the answer that the model gave to another question."""

    question: Question
    answer: str
    control: str

    @property
    def is_right(self) -> bool:
        return is_same(self.answer, self.question.answer)

    @property
    def is_control_right(self) -> bool:
        return is_same(self.control, self.question.answer)


@dataclass(frozen=True)
class TalkRow:
    """The result of a topic.

    `accuracy` is the share of the `asked` questions that the model answered right, `control` the share that the control
    (see the top of this file) answered right.
    """

    topic: str
    accuracy: float
    control: float
    asked: int


def is_same(answer: str, expected: str) -> bool:
    """Returns whether two answers are the same, apart from white space around them."""
    return answer.strip() == expected.strip()


def check_topics(topics: Sequence[str] | None) -> tuple[str, ...]:
    for topic in topics or ():
        if topic not in ASKED:
            raise RedlineError(f"unknown topic {topic!r}: use one of {', '.join(ASKED)}.")
    return tuple(topics or ASKED)


def evaluate_answers(
    answer: Answerer,
    topics: Sequence[str] | None = None,
    samples: int = 64,
    seed: int = 0,
    status: Callable[[str], None] = lambda line: None,
) -> list[Answered]:
    """Asks `samples` held-out questions per topic.

    `answer` is called once per topic with the messages of all its questions, and returns one answer for each.
    """
    chosen = check_topics(topics)
    if samples < 2:
        raise RedlineError(f"samples must be at least 2, because the control needs another question, not {samples}.")
    found: list[Answered] = []
    for topic in chosen:
        status(f"{topic}: {samples} questions …")
        questions = [question(topic, number, seed) for number in range(samples)]
        answers = answer([one.messages for one in questions])
        for number, (one, given) in enumerate(zip(questions, answers, strict=True)):
            found.append(Answered(one, given, answers[_other(questions, number)]))
    return found


def _other(questions: list[Question], number: int) -> int:
    """Returns the index of the next question with another right answer; if there is none, of the next question."""
    others = [*range(number + 1, len(questions)), *range(number)]
    return next((one for one in others if not is_same(questions[one].answer, questions[number].answer)), others[0])


def rows_of(answered: Sequence[Answered]) -> list[TalkRow]:
    """Returns a row for each topic."""
    names = dict.fromkeys(one.question.topic for one in answered)
    return [_row(name, [one for one in answered if one.question.topic == name]) for name in names]


def total(answered: Sequence[Answered]) -> TalkRow:
    return _row("all", answered)


def _row(topic: str, answered: Sequence[Answered]) -> TalkRow:
    count = len(answered)
    right, control = sum(one.is_right for one in answered), sum(one.is_control_right for one in answered)
    return TalkRow(topic, right / count, control / count, count)


def is_meaningful(row: TalkRow) -> bool:
    """Returns whether the control is right so rarely that the accuracy of the row means something."""
    return row.control <= _CONTROL_LIMIT
