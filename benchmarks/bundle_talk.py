"""Makes the bundled chat model from a finished piece of `talk_training.py`: the folder, its scores, and its card.

    python benchmarks/bundle_talk.py PIECE --into src/redline/models/decoder/weights/talk-small

The card shows the accuracy of the stored weights on held-out questions and one conversation, answered greedily. A
folder of more than 8 MB, or an evaluation whose control does not fail, is refused and nothing is written.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from talk_training import MODEL, unpack

from redline import RedlineError
from redline.files.atomic import write_text
from redline.generation.talk_evaluation import TalkEvaluation, evaluate_talk
from redline.generation.text_generator import TextGenerator

LIMIT_BYTES = 8_000_000
CARD, SCORES = "README.md", "scores.json"
# The longest answer in the conversation of the card.
ANSWER_TOKENS = 160
# What the user says in the conversation of the card.
SAID = (
    "Hello!",
    "My name is Sara and I live in Lisbon.",
    "Who are you?",
    "What is 47 + 38?",
    "In one word, please.",
    "Tell me a short story about a fox.",
    "Who did the fox meet?",
    "How do you spell giraffe?",
    "Tom is taller than Anna. Anna is taller than Paul. Who is the tallest?",
    "What is the capital of Hungary? Answer as JSON.",
    "Who won the game yesterday?",
    "What is my name?",
    "Where do I live?",
    "Thank you!",
)


def talk(model: Path) -> list[dict[str, str]]:
    """Returns the conversation of the card."""
    generator, messages = TextGenerator(model, device="cpu"), []
    for said in SAID:
        messages.append({"role": "user", "content": said})
        messages.append({"role": "assistant", "content": str(generator.chat(messages, max_tokens=ANSWER_TOKENS))})
    return messages


def card_text(name: str, row: dict[str, Any], scores: TalkEvaluation, messages: list[dict[str, str]], size: int) -> str:
    lines = [f"| {one.topic} | {one.accuracy:.1%} | {one.control:.1%} | {one.asked} |" for one in scores.rows]
    whole = scores.total
    said = "\n".join(f"> **{one['role']}**: {one['content']}".replace("\n", "\n> ") + "\n>" for one in messages)
    return f"""# {name}

A small chat model that comes with Redline, so that `redline chat` and `redline serve` work with nothing downloaded. It
was trained by `redline train {name}` on conversations that Redline writes (`redline.datasets.conversations`).

## Model

A Llama-shaped decoder, {size / 1e6:.2f} MB with its tokenizer, weights in fp16 (`config.json` has its dimensions).

## Training

{row["step"]:,} steps, {row["tokens"]:,} tokens in {row["total_s"] / 60:.1f} minutes on {row["device"]}, torch
{row["torch"]}; the loss counts the assistant's tokens. The last training loss is {row["loss"]:.4f}.

## Scores

Held-out questions, greedy answers, compared with the whole expected answer (`redline eval talk {name}`). The control is
the answer to another question.

| topic | right | control | asked |
| --- | --- | --- | --- |
{chr(10).join(lines)}
| **all** | **{whole.accuracy:.1%}** | {whole.control:.1%} | {whole.asked} |

## A conversation

Greedy, as the stored weights answer on a CPU:

{said}

## Limits

It knows only what its conversations contain: small numbers, common words, a small table of facts, short stories from a
grammar. It makes mistakes, also where it sounds sure. It only knows English, and cannot look anything up.

## Licence

The weights are under the Apache License 2.0, as the package is. No foreign text was used for training.
"""


def bundle(piece: Path, into: Path, samples: int) -> TalkEvaluation:
    with tempfile.TemporaryDirectory(prefix="redline-bundle-") as temporary:
        before, made = Path(temporary, "piece"), Path(temporary, into.name)
        unpack(piece, before)
        shutil.copytree(before / MODEL, made)
        row = json.loads((before / "result.json").read_text())
        # Without indentation, the tokenizer takes a third of the space.
        tokenizer = json.loads((made / "tokenizer.json").read_text())
        write_text(made / "tokenizer.json", json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")) + "\n")
        size = sum(path.stat().st_size for path in made.iterdir())
        if size > LIMIT_BYTES:
            raise RedlineError(f"the model folder has {size:,} bytes, more than {LIMIT_BYTES:,}.")
        scores = evaluate_talk(made, samples=samples, device="cpu", status=lambda line: print(line, file=sys.stderr))
        if not scores.is_meaningful:
            raise RedlineError(
                "the control of the evaluation did not fail: the answers do not depend on the questions."
            )
        write_text(made / CARD, card_text(into.name, row, scores, talk(made), size))
        about = {"training": row, "topics": [asdict(one) for one in (*scores.rows, scores.total)]}
        write_text(made / SCORES, json.dumps(about, indent=2) + "\n")
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(made, into)
    return scores


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes the bundled chat model from a finished piece.")
    parser.add_argument("piece", type=Path, help="output folder of talk_training.py")
    parser.add_argument("--into", type=Path, required=True, help="folder of the bundled model, which is replaced")
    parser.add_argument("--samples", type=int, default=100, help="held-out questions per topic")
    arguments = parser.parse_args()
    try:
        scores = bundle(arguments.piece, arguments.into, arguments.samples)
    except RedlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(scores.total)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
