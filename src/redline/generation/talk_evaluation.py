"""`redline.evaluate_talk`: counts the held-out questions that a chat model answers exactly right, by topic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.errors import RedlineError
from redline.evaluation.talk import Answered, Message, TalkRow, evaluate_answers, is_meaningful, rows_of, total
from redline.evaluation.talk.evaluate import check_topics
from redline.generation.chat_prompt import ChatPrompt
from redline.generation.chat_template import ChatTemplate
from redline.generation.text_generator import TextGenerator

# No correct answer to a held-out question is longer.
_MAX_TOKENS = 224


@dataclass(frozen=True)
class TalkEvaluation:
    """The results: `rows` has a row for each topic, `total` is the row over all topics, `answered` has every answer."""

    model: str
    rows: list[TalkRow]
    total: TalkRow
    answered: list[Answered]

    @property
    def is_meaningful(self) -> bool:
        """Whether the control, which must fail, failed; otherwise the scores mean nothing."""
        return is_meaningful(self.total)


def evaluate_talk(
    model: str | Path | None = None,
    *,
    topics: Sequence[str] | None = None,
    samples: int = 64,
    batch: int = 64,
    seed: int = 0,
    precision: str = "auto",
    device: str = "auto",
    status: Callable[[str], None] = lambda line: None,
) -> TalkEvaluation:
    """Asks a chat model questions whose combinations its training never contained, and compares whole answers.

    `model` is a folder with a chat template; by default the bundled model. `samples` questions of each of the `topics`
    (default: all) are answered greedily, `batch` at a time.
    """
    check_topics(topics)
    if batch < 1:
        raise RedlineError(f"batch must be at least 1, not {batch}.")
    generator = TextGenerator(model, device=device, precision=precision)
    prompt = ChatPrompt(generator.tokenizer, ChatTemplate.read(generator.folder.path))

    def answer(conversations: Sequence[list[Message]]) -> list[str]:
        tokens = [prompt.encode(messages) for messages in conversations]
        answers: list[str] = []
        stops = generator.folder.stop_tokens
        for first in range(0, len(tokens), batch):
            chosen = tokens[first : first + batch]
            for found in generator.batch_engine.generate(chosen, max_tokens=_MAX_TOKENS, stop_tokens=stops):
                answers.append(generator.tokenizer.decode(found.tokens, skip_special_tokens=True))
        return answers

    answered = evaluate_answers(answer, topics, samples, seed, status)
    return TalkEvaluation(generator.folder.path.name, rows_of(answered), total(answered), answered)
