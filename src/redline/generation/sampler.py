"""Holds the sampling state of all rows of the engine: settings on the host, token counts for penalties on the device.

N: entries of a step (sampled tokens; a row has several if drafts are verified), R: rows of the engine, V: vocabulary,
M: entries that use a setting, K: alternatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from redline.generation.request import SamplingOptions
from redline.generation.sampling import (
    LEAST_TEMPERATURE,
    Form,
    Numbers,
    Penalties,
    choose,
    masked,
    penalized,
    seed_key,
)
from redline.generation.step_plan import PlannedRow


@dataclass(frozen=True)
class Sampled:
    """The tokens of a step, and for the entries `asked` the log-probabilities of these tokens and of alternatives."""

    tokens_N: Tensor
    asked: list[int]
    chosen_M: Tensor | None = None
    top_MK: Tensor | None = None
    top_tokens_MK: Tensor | None = None

    def ordered_by(self, places: list[int]) -> "Sampled":
        """Returns the entries at these places, in this order."""
        if places == list(range(len(places))):
            return self
        asked = [places.index(place) for place in self.asked]
        tokens_N = self.tokens_N[torch.tensor(places, device=self.tokens_N.device)]
        return Sampled(tokens_N, asked, self.chosen_M, self.top_MK, self.top_tokens_MK)


class Sampler:
    """Samples only among the first `vocabulary` tokens; the logits may cover more."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device, self.rows = vocabulary, device, rows
        self._floats = np.zeros((6, rows), dtype=np.float32)
        self._ints = np.zeros((2, rows), dtype=np.int64)
        # For penalties: the tokens that each row contains, and how often it generated each token. Allocated when the
        # first request with a penalty is admitted.
        self._seen_RV: Tensor | None = None
        self._counts_RV: Tensor | None = None

    def admit(self, row: int, options: SamplingOptions, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Stores the settings of a row, and counts the tokens so far of its request if a penalty needs them."""
        temperature = options.temperature if options.temperature >= LEAST_TEMPERATURE else 0.0
        penalties = (options.repetition_penalty, options.presence_penalty, options.frequency_penalty)
        self._floats[:, row] = (temperature, options.top_p, options.min_p, *penalties)
        self._ints[:, row] = (min(options.top_k, self.vocabulary), seed_key(options.seed))
        if not has_penalties(options):
            return
        if self._seen_RV is None or self._counts_RV is None:
            shape = (self.rows, self.vocabulary)
            self._seen_RV = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self._counts_RV = torch.zeros(shape, dtype=torch.int32, device=self.device)
        generated = self._sent(list(output))
        self._seen_RV[row].zero_().index_fill_(0, self._sent([*prompt, *output]), True)
        self._counts_RV[row].zero_().index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def sample(self, logits_NV: Tensor, entries: Sequence[PlannedRow], masks: Sequence[bytes | None]) -> Sampled:
        """Samples a token for each entry. `entries` repeats each planned row once for each token that it samples.

        `masks` holds the allowed tokens of each entry as bits, or None if all are allowed.
        """
        raw_NV = logits_NV = logits_NV[:, : self.vocabulary]
        numbers, form = self._settings(entries)
        penalties = self._penalties(entries)
        if penalties is not None:
            logits_NV = penalized(logits_NV.float(), penalties)
        logits_NV = self._biased(logits_NV, entries)
        if constrained := [index for index, mask in enumerate(masks) if mask is not None]:
            bits = np.stack([np.frombuffer(mask, dtype=np.int32) for mask in masks if mask is not None])
            logits_NV = masked(logits_NV.float(), self._sent(constrained), self._sent(bits))
        tokens_N = choose(logits_NV, numbers, form)
        if penalties is not None:
            self._count(entries, penalties, tokens_N)
        return self._with_logprobs(raw_NV, tokens_N, entries)

    def _settings(self, entries: Sequence[PlannedRow]) -> tuple[Numbers, Form]:
        rows = np.fromiter((entry.row for entry in entries), dtype=np.int64, count=len(entries))
        temperature, top_p, min_p = self._floats[:3, rows]
        top_k, keys = self._ints[:, rows]
        draws = temperature > 0
        if not draws.any():
            zeros = torch.zeros(len(entries), device=self.device)
            whole = zeros.long()
            return Numbers(zeros, whole, zeros, zeros, whole, whole), Form()
        drawn, previous, count = [], None, 0
        for entry in entries:
            count = count + 1 if entry is previous else 0
            drawn.append(entry.generated + count)
            previous = entry
        cut = np.flatnonzero(draws & ((top_k > 0) | (top_p < 1)))
        form = Form(
            int(top_k[cut].max(initial=0)),
            bool((top_p[cut] < 1).any()),
            bool((min_p[draws] > 0).any()),
            self._sent(cut) if len(cut) else None,
        )
        floats = self._sent(np.stack((temperature, top_p, min_p)))
        ints = self._sent(np.stack((top_k, keys, np.array(drawn))))
        return Numbers(floats[0], ints[0], floats[1], floats[2], ints[1], ints[2]), form

    def _penalties(self, entries: Sequence[PlannedRow]) -> Penalties | None:
        chosen = [i for i, entry in enumerate(entries) if has_penalties(entry.sequence.request.sampling)]
        if not chosen or self._seen_RV is None or self._counts_RV is None:
            return None
        rows = [entries[index].row for index in chosen]
        rows_M, numbers = self._sent(rows), self._sent(self._floats[3:, rows])
        repetition, presence, frequency = numbers.unbind()
        return Penalties(
            self._sent(chosen), repetition, presence, frequency, self._seen_RV[rows_M], self._counts_RV[rows_M]
        )

    def _count(self, entries: Sequence[PlannedRow], penalties: Penalties, tokens_N: Tensor) -> None:
        assert self._seen_RV is not None and self._counts_RV is not None
        rows_M = self._sent([entry.row for entry in entries if has_penalties(entry.sequence.request.sampling)])
        tokens_M = tokens_N[penalties.rows_M].clamp(min=0)
        self._seen_RV.index_put_((rows_M, tokens_M), torch.ones_like(tokens_M, dtype=torch.bool))
        self._counts_RV.index_put_((rows_M, tokens_M), torch.ones_like(tokens_M, dtype=torch.int32), accumulate=True)

    def _biased(self, logits_NV: Tensor, entries: Sequence[PlannedRow]) -> Tensor:
        """Adds `logit_bias`, and −∞ for stop tokens before `min_tokens`."""
        places: list[tuple[int, int]] = []
        values: list[float] = []
        for index, entry in enumerate(entries):
            request = entry.sequence.request
            for token, bias in request.sampling.logit_bias.items():
                if 0 <= token < self.vocabulary:
                    places.append((index, token))
                    values.append(bias)
            # `entry.generated` does not count drafts before an entry, but requests with `min_tokens` have no drafts.
            if entry.generated < request.min_tokens:
                banned = [token for token in request.stop_tokens if 0 <= token < self.vocabulary]
                places += [(index, token) for token in banned]
                values += [float("-inf")] * len(banned)
        if not places:
            return logits_NV
        rows, tokens = self._sent(np.array(places).T)
        added = self._sent(np.array(values, dtype=np.float32))
        return logits_NV.float().index_put((rows, tokens), added, accumulate=True)

    def _with_logprobs(self, raw_NV: Tensor, tokens_N: Tensor, entries: Sequence[PlannedRow]) -> Sampled:
        asked = [i for i, entry in enumerate(entries) if entry.sequence.request.logprobs is not None]
        if not asked:
            return Sampled(tokens_N, asked)
        asked_M = self._sent(asked)
        logprobs_MV = raw_NV[asked_M].float().log_softmax(-1)
        chosen_M = logprobs_MV.gather(1, tokens_N[asked_M].clamp(min=0)[:, None])[:, 0]
        most = max(entries[index].sequence.request.logprobs or 0 for index in asked)
        top_MK, top_tokens_MK = logprobs_MV.topk(min(most, self.vocabulary), dim=-1)
        return Sampled(tokens_N, asked, chosen_M, top_MK, top_tokens_MK)

    def _sent(self, numbers: list[int] | np.ndarray) -> Tensor:
        """Copies the numbers to the device. The host does not wait for running kernels."""
        tensor = torch.tensor(numbers, dtype=torch.int64) if isinstance(numbers, list) else torch.from_numpy(numbers)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)


def has_penalties(options: SamplingOptions) -> bool:
    return bool(options.repetition_penalty != 1 or options.presence_penalty or options.frequency_penalty)
