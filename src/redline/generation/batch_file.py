"""Files of prompts and results for offline batches, one JSON value per line.

A line is a text, an object with `prompt` or `messages` and options, or a request in OpenAI's batch format
(`custom_id`, `url`, `body`). The result of a line in OpenAI's format has OpenAI's format too. A file next to the
results records the settings that they were made with.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.atomic import write_text
from redline.files.untrusted import parse_json, read_json, shorten
from redline.generation.request import Grammar, SamplingOptions

_URLS = ("/v1/chat/completions", "/v1/completions")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WHOLE = ("top_k", "seed")
# Fields of OpenAI's requests that batches refuse: they would change the answer, and batches do not support them.
_REFUSED = ("tools", "functions", "logprobs", "top_logprobs", "audio", "suffix", "best_of", "echo")
# The fields of a line that does not have OpenAI's format.
_FIELDS = frozenset(
    ("prompt", "messages", "id", "custom_id", "max_tokens", "max_completion_tokens", "min_tokens", "n", "stop")
    + ("logit_bias", "ignore_eos", "response_format", *_NUMBERS, *_WHOLE)
)


@dataclass(frozen=True)
class Job:
    """One line: its number from 1, its name, and what to generate. Only a line in OpenAI's format has a `url`."""

    number: int
    name: str
    given: Mapping[str, Any]
    url: str = ""


@dataclass
class Answer:
    """The text that was generated for a job, or in `error` the reason why the job has no text."""

    text: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class JobOptions:
    """The options of a job. Options that the job does not set have the defaults of the batch."""

    max_tokens: int
    sampling: SamplingOptions
    stop: list[str] = field(default_factory=list)
    grammar: Grammar | None = None
    min_tokens: int = 0
    ignore_eos: bool = False


def check_jobs(path: Path) -> int:
    """Returns the number of jobs in a file. Raises RedlineError with the number and the field of a line that is wrong.

    Does not check the body of a request in OpenAI's format: if the body is wrong, the result of this request is an
    error response, as from a server, and the other jobs run.
    """
    count = 0
    for job in read_jobs(path):
        count += 1
        if not job.url:
            try:
                _check_fields(job)
            except RedlineError as error:
                raise RedlineError(f"line {job.number} of {str(path)!r} is wrong: {error}") from error
    return count


def _check_fields(job: Job) -> None:
    for name in job.given:
        if name in _REFUSED:
            raise RedlineError(f"{name} is not supported in batches.")
        if name not in _FIELDS:
            near = get_close_matches(name, _FIELDS, 1)
            raise RedlineError(f"unknown field {shorten(name)}{f' (did you mean {near[0]!r}?)' if near else ''}.")
    prompt, messages = job.given.get("prompt"), job.given.get("messages")
    is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    if "prompt" in job.given and not isinstance(prompt, str) and not is_tokens:
        raise RedlineError("prompt must be a text or a list of token ids.")
    is_chat = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if "messages" in job.given and not is_chat:
        raise RedlineError("messages must be a list of objects with a role and content.")
    options_of(job, JobOptions(1, SamplingOptions()))


def read_jobs(path: Path) -> Iterator[Job]:
    """Yields the jobs of a file. Raises RedlineError with the number of the first line that is not a job."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _read_job(line, number, path)
    except OSError as error:
        raise RedlineError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise RedlineError(f"{str(path)!r} is not UTF-8 text.") from error


def _read_job(line: str, number: int, path: Path) -> Job:
    where = f"line {number} of {str(path)!r}"
    given = parse_json(line, where)
    if isinstance(given, str):
        given = {"prompt": given}
    if not isinstance(given, dict):
        raise RedlineError(f'{where} must be a text or an object such as {{"prompt": "The sea is"}}.')
    name, url = given.get("custom_id", given.get("id", str(number))), given.get("url", "")
    if not isinstance(name, str | int):
        raise RedlineError(f"{where} has an id that is neither a text nor a number.")
    if "body" in given:
        if url not in _URLS or not isinstance(given["body"], dict):
            raise RedlineError(f"{where} must have an object as its body and a url that is one of {', '.join(_URLS)}.")
        return Job(number, str(name), given["body"], url)
    if ("prompt" in given) == ("messages" in given):
        raise RedlineError(f"{where} must have either a prompt or messages.")
    return Job(number, str(name), given)


def options_of(job: Job, defaults: JobOptions) -> JobOptions:
    """Returns the options of a job. Raises RedlineError if one is unknown or wrong."""
    given = job.given
    for name in _REFUSED:
        if given.get(name):
            raise RedlineError(f"{name} is not supported in batches.")
    if given.get("n") not in (None, 1):
        raise RedlineError("n must be 1 in batches: repeat the line with other seeds.")
    changes: dict[str, Any] = {}
    for name in (*_NUMBERS, *_WHOLE):
        value = given.get(name)
        if value is not None:
            changes[name] = _number(name, value, whole=name in _WHOLE)
    if (bias := given.get("logit_bias")) is not None:
        if not isinstance(bias, dict):
            raise RedlineError("logit_bias must be an object of token ids and numbers.")
        try:
            changes["logit_bias"] = {int(token): float(value) for token, value in bias.items()}
        except (TypeError, ValueError) as error:
            raise RedlineError("logit_bias must be an object of token ids and numbers.") from error
    own = {name: getattr(defaults.sampling, name) for name in defaults.sampling.__struct_fields__}
    longest, shortest, ignore_eos = defaults.max_tokens, 0, given.get("ignore_eos")
    for name in ("max_tokens", "max_completion_tokens"):
        if (value := given.get(name)) is not None and (longest := int(_number(name, value, whole=True))) < 1:
            raise RedlineError(f"{name} must be at least 1 token, not {longest}.")
    if (value := given.get("min_tokens")) is not None and (shortest := int(_number("min_tokens", value, True))) < 0:
        raise RedlineError(f"min_tokens must be at least 0, not {shortest}.")
    if ignore_eos is not None and not isinstance(ignore_eos, bool):
        raise RedlineError(f"ignore_eos must be true or false, not {json.dumps(ignore_eos)}.")
    stop = given.get("stop")
    stop = [] if stop is None or stop == "" else [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise RedlineError("stop must be a text or a list of texts.")
    return JobOptions(
        longest,
        SamplingOptions(**own | changes),
        stop,
        _grammar(given.get("response_format")),
        shortest,
        ignore_eos is True,
    )


def _number(name: str, value: object, whole: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise RedlineError(f"{name} must be a {'whole ' if whole else ''}number, not {json.dumps(value)}.")
    return value


def _grammar(form: Any) -> Grammar | None:
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json")
    schema = form.get("json_schema", {}) if isinstance(form, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict) or "schema" not in schema:
        raise RedlineError("response_format must have the type text, json_object, or json_schema with a schema.")
    return Grammar("json_schema", json.dumps(schema["schema"]))


def result_line(job: Job, answer: Answer, model: str) -> str:
    """Returns the line of a result, without the line break at its end."""
    if not job.url:
        found: dict[str, Any] = {"id": job.name, "text": answer.text, "reason": answer.reason}
        found |= {"prompt_tokens": answer.prompt_tokens, "tokens": answer.tokens}
        return json.dumps({"id": job.name, "error": answer.error} if answer.error else found, ensure_ascii=False)
    if answer.error:
        about = {"message": answer.error, "type": "invalid_request_error", "param": None, "code": None}
        status, body = 400, {"error": about}
    else:
        status, body = 200, _body(job, answer, model)
    response = {"status_code": status, "request_id": f"req-{job.number}", "body": body}
    found = {"id": f"batch_req_{job.number}", "custom_id": job.name, "response": response, "error": None}
    return json.dumps(found, ensure_ascii=False)


def _body(job: Job, answer: Answer, model: str) -> dict[str, Any]:
    reason = "stop" if answer.reason == "stop" else "length"
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
    is_chat = job.url == _URLS[0]
    if is_chat:
        choice["message"] = {"role": "assistant", "content": answer.text}
    else:
        choice["text"] = answer.text
    usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens}
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{job.number}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage | {"total_tokens": answer.prompt_tokens + answer.tokens},
    }


def find_failures(path: Path) -> tuple[int, str]:
    """Returns how many results in a file are errors, and the message of the first error, or "" if there is none."""
    count, first = 0, ""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if error := _error_of(parse_json(line.decode(), f"line {number} of {str(path)!r}")):
                    count, first = count + 1, first or error
    except (OSError, UnicodeDecodeError) as error:
        raise RedlineError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}.") from error
    return count, first


def _error_of(found: Any) -> str:
    if not isinstance(found, dict):
        return ""
    name, response, error = found.get("custom_id", found.get("id")), found.get("response"), found.get("error")
    if isinstance(response, dict) and response.get("status_code") != 200:
        body = response.get("body")
        error = body.get("error") if isinstance(body, dict) else None
        error = (error.get("message") if isinstance(error, dict) else error) or "it has no answer."
    return f"{name}: {error}" if error else ""


def settings_path(results: Path) -> Path:
    """Returns the path of the file that records the settings of a file of results."""
    return results.with_name(f"{results.name}.settings.json")


class ResultFile:
    """Appends results in the order of the jobs. If the file already has results, new ones are written after them.

    `settings` is what the results depend on besides the jobs: JSON values by their names.
    """

    def __init__(self, path: Path, jobs: Iterator[Job], settings: Mapping[str, Any]) -> None:
        """Reads past the jobs that have a result. Raises if the file belongs to other jobs or to other settings."""
        self.path, self.done = path, 0
        end = 0
        try:
            with path.open("a+b") as file:
                file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # the line was being written when the last run stopped
                    self._check(line, next(jobs, None))
                    self.done, end = self.done + 1, end + len(line)
                self._check_settings(settings)
                file.truncate(end)
            self._file = path.open("ab")
        except OSError as error:
            raise RedlineError(f"cannot write {str(path)!r}: {error.strerror or error}.") from error

    def write(self, line: str) -> None:
        try:
            self._file.write(line.encode("utf-8", "replace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise RedlineError(f"cannot write {str(self.path)!r}: {error.strerror or error}.") from error

    def close(self) -> None:
        self._file.close()

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Records the settings if there are no results yet; raises if the results were made with others."""
        path, settings = settings_path(self.path), json.loads(json.dumps(settings))
        if not self.done:
            write_text(path, json.dumps(settings, indent=2) + "\n")
            return
        advice = f"choose another file for the results (--out), or delete {str(self.path)!r}."
        if not path.exists():
            raise RedlineError(
                f"there is no {str(path)!r}, which says how the results in {str(self.path)!r} were made: {advice}"
            )
        before = read_json(path, "record of settings")
        before = before if isinstance(before, dict) else {}
        for name in sorted(before.keys() | settings.keys()):
            old, new = before.get(name), settings.get(name)
            if old != new:
                changed = f"{name} was {shorten(old)}, and now is {shorten(new)}"
                raise RedlineError(
                    f"the results in {str(self.path)!r} were made with other settings ({changed}): {advice}"
                )

    def _check(self, line: bytes, job: Job | None) -> None:
        try:
            found = json.loads(line)
            name = str(found.get("custom_id", found.get("id")))
        except (ValueError, AttributeError):
            name = None
        if job is None or name != job.name:
            raise RedlineError(
                f"{str(self.path)!r} does not hold the results of these prompts (line {self.done + 1}): delete it, or "
                "choose another file."
            )
