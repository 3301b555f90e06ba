"""Computes the log-probabilities of the tokens of given texts. Evaluations compare them to choose an answer."""

from collections.abc import Sequence

import torch

from redline.errors import RedlineError
from redline.generation.planned import PlannedModel
from redline.generation.request import TokenLogprobs

# The number of positions whose logits are computed at once, which limits the memory for logits.
_POSITIONS = 512


@torch.no_grad()
def score(
    model: PlannedModel, prompts: Sequence[Sequence[int]], top: int, device: torch.device
) -> list[list[TokenLogprobs]]:
    """Returns, per prompt, the log-probability of every token but the first, and the `top` most likely tokens."""
    return [_score_one(model, prompt, top, device) for prompt in prompts]


def _score_one(model: PlannedModel, prompt: Sequence[int], top: int, device: torch.device) -> list[TokenLogprobs]:
    context = model.context
    if context is not None and len(prompt) > context:
        raise RedlineError(
            f"the prompt has {len(prompt)} tokens, and the model's context is {context}: shorten the prompt."
        )
    tokens_S = torch.tensor(prompt, device=device)
    hidden_SW = model.hidden(tokens_S[None])[0]
    found: list[TokenLogprobs] = []
    for begin in range(0, len(prompt) - 1, _POSITIONS):
        end = min(begin + _POSITIONS, len(prompt) - 1)
        next_P = tokens_S[begin + 1 : end + 1]
        logprobs_PV = model.logits(hidden_SW[begin:end]).float().log_softmax(-1)
        chosen_P = logprobs_PV.gather(1, next_P[:, None])[:, 0]
        values_PT, likely_PT = logprobs_PV.topk(min(top, logprobs_PV.shape[1]), -1)
        rows = zip(next_P.tolist(), chosen_P.tolist(), likely_PT.tolist(), values_PT.tolist(), strict=True)
        found += [
            TokenLogprobs(token, value, list(zip(likely, values, strict=True))) for token, value, likely, values in rows
        ]
    return found
