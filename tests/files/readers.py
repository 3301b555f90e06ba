"""All readers of untrusted files: how to write a valid file, how to read it, and the fuzzer of its format."""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fuzzed_files import (
    fuzz_bytes,
    fuzz_checkpoint,
    fuzz_json,
    fuzz_json_lines,
    fuzz_metadata,
    fuzz_safetensors,
    fuzz_toml,
)
from redline.evaluation.recall import task_in
from redline.files import untrusted
from redline.files.partial import check_is_free, owner_mark
from redline.generation.chat_template import ChatTemplate
from redline.generation.folder import ModelFolder, read_tokenizer
from redline.ladder.bench import BenchRun
from redline.ladder.gate import Score
from redline.ladder.measurement import Measurement, load_measurements
from redline.ladder.plan import Plan
from redline.ladder.report import ladder_rows, render_html, render_markdown
from redline.ladder.report.climb import Climb, choose_run
from redline.ladder.search.history import History, Record
from redline.ladder.workloads.addresses import load_workload
from redline.machine.machine import Ceilings, Machine
from redline.models.decoder import load_decoder
from redline.models.drct import Drct, DrctConfig, load_drct, save_drct
from redline.models.lsd import Lsd, LsdConfig, load_lsd, save_lsd
from redline.models.memory import TitanConfig, TitanModel, load_memory_model, save_memory_model
from redline.stream.browser.messages import read as read_message
from redline.stream.loading import _index
from redline.stream.settings import parse_change
from redline.training.bundled import CONFIGS
from redline.training.checkpoints import Checkpoints, Position, read_checkpoint
from redline.training.journal import read_journal
from redline.training.lsd.settings import LsdTraining
from redline.training.super_resolution import DrctTraining
from redline.training.text.config import TextTraining
from redline.training.text.corpus import TokenizerSettings, open_corpus, prepare
from redline.training.text.sources import Sources
from redline.training.text.tokenizer import load_tokenizer
from redline.upscale.journal import Journal
from redline.upscale.tasks import Task
from redline.upscale.video.parts import PartsFolder, tiles_of_parts

from ..generation.tiny_language_model import write_model
from ..training.test_checkpoints import learn, state

_MEMORY = TitanConfig(vocabulary=31, width=24, layers=2, heads=4, attention_every=2, segment=8, memory_slots=6)
Fuzzer = Callable[[bytes, random.Random], Iterator[bytes]]


@dataclass(frozen=True)
class Reader:
    """`write` makes a valid file in a folder and returns its path; `read` reads it."""

    name: str
    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    fuzz: Fuzzer


def _text(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return write


def _measurement() -> Measurement:
    ceilings = {"bytes_per_s": 1e10, "matmul_flops_per_s": {"fp32": 1e12}, "convolution_flops_per_s": {"fp32": 1e12}}
    machine = {"name": "m", "device": "cpu", "cores": 2, "host_bytes": 2**30, "device_bytes": 2**30, "fingerprint": "f"}
    machine |= {"versions": {"torch": "2"}, "ceilings": ceilings, "system": "Linux", "python": "3.11", "driver": ""}
    samples = {"batch=1": (1.0, 2.0, 3.0), "batch=8": (4.0, 5.0, 6.0)}
    by_shape = dict.fromkeys(samples, 1e9)
    score = Score("relative_error", 0.001, 0.02, "lower", True)
    return Measurement(
        *("resnet", "bf16", "final", "kept", "it is faster", machine, "bf16", samples, "eager", samples, 3, by_shape),
        peak_bytes=2**20, flops=by_shape, least_bytes=by_shape, scores=(score,), proof={"a": "b"}, notes=("n",),
        items=by_shape, options={"batch": [1]}, sources={"a.py": "d"}, digest="d", run="r", created=time.time(),
    )  # fmt: skip


def _write_measurements(folder: Path) -> Path:
    final, path = _measurement(), folder / "m.jsonl"
    rows = [final, Measurement(**{**final.__dict__, "role": "baseline", "verdict": "baseline", "plan": "eager"})]
    path.write_text("".join(row.to_json() + "\n" for row in rows))
    return path


def _report(path: Path) -> None:
    rows = load_measurements(path)
    ladder_rows(rows)
    climb = Climb.of(choose_run(rows, None))
    render_markdown(climb).encode()
    render_html(climb).encode()


def _write_bench(folder: Path) -> Path:
    BenchRun((_measurement(),)).save(folder / "b.json")
    return folder / "b.json"


def _write_checkpoint(folder: Path) -> Path:
    some = state()
    learn(some)
    return Checkpoints(folder).save(some, Position(11, 2.5, 3))


def _write_corpus(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"text": "many words of a text"}\n' * 20)
    sources = Sources.find((str(folder / "a.jsonl"),))
    return prepare(sources, TokenizerSettings(vocabulary=270), folder / "shards").folder / "manifest.json"


def _model_file(name: str, content: str | None = None) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_model(folder)
        if content is not None:
            (folder / name).write_text(content)
        return folder / name

    return write


def _open(path: Path) -> None:
    ModelFolder.open(path.parent)


def _open_and_load(path: Path) -> None:
    ModelFolder.open(path.parent)
    load_decoder(path.parent)


def _write_drct(folder: Path) -> Path:
    save_drct(Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4)), folder / "d.safetensors")
    return folder / "d.safetensors"


def _write_pth(folder: Path) -> Path:
    torch.save({"params": load_file(_write_drct(folder))}, folder / "d.pth")
    return folder / "d.pth"


def _write_lsd(folder: Path) -> Path:
    save_lsd(Lsd(LsdConfig(2, 8, (1, 2), control=0)), folder / "l.safetensors")
    return folder / "l.safetensors"


def _memory_file(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        save_memory_model(TitanModel(_MEMORY), folder, {"recall": {"task": "mqar"}})
        return folder / name

    return write


def _load_memory(path: Path) -> None:
    task_in(untrusted.read_json_object(path.parent / "config.json", "model file"))
    load_memory_model(path.parent)


def _write_state(folder: Path) -> Path:
    _MODEL.new_state().save(folder / "state.safetensors")
    return folder / "state.safetensors"


_MODEL = TitanModel(_MEMORY).eval()


_RATES = dict.fromkeys(("fp32", "bf16", "fp16"), 1e12)


def _write_cache(folder: Path) -> Path:
    path = Machine.detect("cpu").cache_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(Ceilings(1e10, _RATES, _RATES))))
    return path


def _detect(path: Path) -> None:
    machine = Machine.detect("cpu")
    if machine.ceilings is not None:
        machine.recommended_precision()
        machine.why_slow("bf16")


def _write_journal(folder: Path) -> Path:
    (folder / "0.png").write_bytes(b"x")
    task = Task(folder / "0.png", folder / "0.png")
    Journal(folder, lambda _: "s").record(task, task.source_state(), _tiles())
    return folder / ".redline-upscale.jsonl"


def _tiles() -> Any:
    from redline.upscale.settings import Tiles

    return Tiles(((32, 32), (16, 32)), 2)


def _read_upscale_journal(path: Path) -> None:
    task = Task(path.parent / "0.png", path.parent / "0.png")
    journal = Journal(path.parent, lambda _: "s")
    journal.is_done(task)
    journal.tiles([task])


_JOB = {"the model": "m", "the tiles": [[[32, 32]], 2], "the scale": 2}


def _write_job(folder: Path) -> Path:
    parts = PartsFolder(folder / "film.mp4")
    parts.path.mkdir()
    (parts.path / "job.json").write_text(json.dumps(_JOB))
    record = {"first": 0, "pts": [0, 1], "last_duration": 1, "delay": 0, "digest": "d", "is_end": False}
    (parts.path / "part-000000.json").write_text(json.dumps({**record, "file_digest": "f", "notes": ["n"]}))
    (parts.path / "part-000000.mkv").write_bytes(b"no film")
    return parts.path / "job.json"


def _read_parts(path: Path) -> None:
    target = path.parent.parent / "film.mp4"
    PartsFolder(target)._usable(_JOB)
    tiles_of_parts(target, "m")


_PIPELINE = {"_class_name": "StableDiffusionImg2ImgPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
_PIPELINE |= {"vae": ["diffusers", "AutoencoderKL"], "text_encoder": ["transformers", "CLIPTextModel"]}
_PIPELINE |= {"tokenizer": ["transformers", "CLIPTokenizer"], "scheduler": ["diffusers", "EulerDiscreteScheduler"]}
_PLAN = """schema = 1
objective = "latency"
[[rung]]
name = "fp8"
skip = ["head", "blocks.1"]
[[rung]]
name = "compile"
mode = "max-autotune"
fullgraph = true
"""


def _config(name: str) -> Callable[[Path], Path]:
    return _text("settings.toml", (CONFIGS / name).read_text())


def _write_history(folder: Path) -> Path:
    history = History(folder / "history.json")
    history.add(Record("bf16", "bf16", False, 100, 1.5, True, 2.0, "d"))
    history.save()
    return folder / "history.json"


def _write_onnx(folder: Path) -> Path:
    import onnx

    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "xy")
    scale = onnx.helper.make_tensor("scale", onnx.TensorProto.FLOAT, [3], [0.5, 1.0, 2.0])
    nodes = [onnx.helper.make_node("Mul", ["x", "scale"], ["z"]), onnx.helper.make_node("Relu", ["z"], ["y"])]
    graph = onnx.helper.make_graph(nodes, "one", [x], [y], [scale])
    onnx.save(onnx.helper.make_model(graph), str(folder / "model.onnx"))
    return folder / "model.onnx"


def _write_hf(folder: Path) -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 300, **sizes}))
    return folder / "config.json"


def _write_index(folder: Path) -> Path:
    """A model whose weights are in two files."""
    write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder / "model.safetensors.index.json"


def _chat(path: Path) -> None:
    ChatTemplate.read(path.parent).render([{"role": "user", "content": "Hello"}])


def _lossy(path: Path) -> str:
    return path.read_text(errors="replace")[:9999]


READERS = (
    Reader("history", _write_history, lambda path: History(path).records, fuzz_json),
    Reader("onnx workload", _write_onnx, lambda path: load_workload(str(path)), fuzz_bytes),
    Reader("hf workload", _write_hf, lambda path: load_workload(f"hf:{path.parent}"), fuzz_json),
    Reader("weights index", _write_index, lambda path: load_decoder(path.parent), fuzz_json),
    Reader(
        "chat template",
        _model_file("chat_template.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"),
        _chat,
        fuzz_bytes,
    ),
    Reader("measurements", _write_measurements, _report, fuzz_json_lines),
    Reader(
        "benchmark",
        _write_bench,
        lambda path: BenchRun((_measurement(),)).compare(BenchRun.load(path), True),
        fuzz_json,
    ),
    Reader("plan", _text("plan.toml", _PLAN), lambda path: str(Plan.load(path)), fuzz_toml),
    Reader("machine cache", _write_cache, _detect, fuzz_json),
    Reader("drct settings", _config("drct-small-x4.toml"), lambda p: DrctTraining.read(p, photos="a"), fuzz_toml),
    Reader("lsd settings", _config("lsd-tiny.toml"), lambda path: LsdTraining.read(path, photos="a"), fuzz_toml),
    Reader("text settings", _config("memory-124m.toml"), lambda p: TextTraining.read(p, sources=("a",)), fuzz_toml),
    Reader("journal", _text("j.jsonl", '{"step": 1, "loss": 2.5}\n{"step": 2}\n'), read_journal, fuzz_json_lines),
    Reader("checkpoint", _write_checkpoint, lambda p: state().restore(read_checkpoint(p), p), fuzz_checkpoint),
    Reader(
        "text",
        _text("a.jsonl", '{"text": "x"}\n{"text": null}\n'),
        lambda p: list(Sources((p,)).documents()),
        fuzz_json_lines,
    ),
    Reader("corpus", _write_corpus, lambda path: open_corpus(path.parent), fuzz_json),
    Reader(
        "corpus shard",
        lambda f: next(_write_corpus(f).parent.glob("*.bin")),
        lambda p: open_corpus(p.parent),
        fuzz_bytes,
    ),
    Reader("corpus tokenizer", _model_file("tokenizer.json"), lambda path: load_tokenizer(path, "</s>"), fuzz_json),
    Reader("model tokenizer", _model_file("tokenizer.json"), lambda path: read_tokenizer(path.parent), fuzz_json),
    Reader("tokenizer config", _model_file("tokenizer_config.json", "{}"), _open, fuzz_json),
    Reader("generation config", _model_file("generation_config.json"), _open, fuzz_json),
    Reader("decoder config", _model_file("config.json"), _open_and_load, fuzz_json),
    Reader("decoder weights", _model_file("model.safetensors"), lambda p: load_decoder(p.parent), fuzz_safetensors),
    Reader("memory config", _memory_file("config.json"), _load_memory, fuzz_json),
    Reader("saved memory", _write_state, lambda path: _MODEL.new_state().load(path), fuzz_safetensors),
    Reader("saved memory's model", _write_state, lambda path: _MODEL.new_state().load(path), fuzz_metadata),
    Reader("drct weights", _write_drct, load_drct, fuzz_safetensors),
    Reader("drct pth", _write_pth, load_drct, fuzz_bytes),
    Reader("lsd weights", _write_lsd, load_lsd, fuzz_safetensors),
    Reader("lsd config", _write_lsd, load_lsd, fuzz_metadata),
    Reader("upscale journal", _write_journal, _read_upscale_journal, fuzz_json_lines),
    Reader("job of a video", _write_job, _read_parts, fuzz_json),
    Reader("part of a video", lambda f: _write_job(f).with_name("part-000000.json"), _read_parts, fuzz_json),
    Reader("pipeline", _text("model_index.json", json.dumps(_PIPELINE)), lambda p: _index(p.parent), fuzz_json),
    Reader("owner", lambda f: _text("owner", owner_mark())(f), lambda path: check_is_free(path, "taken."), fuzz_bytes),
    Reader(
        "changes",
        _text("c", 'strength=0.4 steps=2 control=1,2 prompt="x"'),
        lambda p: parse_change(_lossy(p)),
        fuzz_bytes,
    ),
    Reader(
        "message",
        _text("m", '{"type": "settings", "settings": {"a": [1]}}'),
        lambda p: read_message(_lossy(p)),
        fuzz_json,
    ),
)
