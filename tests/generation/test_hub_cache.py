"""A model is found in the Hugging Face cache by its name and revision, or the command to download it is given."""

from pathlib import Path

import pytest

from redline.errors import ModelError
from redline.generation.folder import cache_folder, find_model

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two snapshots of Owner/Name, main being the second."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--Owner--Name"
    for commit in (FIRST, SECOND):
        (folder / "snapshots" / commit).mkdir(parents=True)
        for part in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / "snapshots" / commit / part).touch()
    (folder / "refs" / "pr").mkdir(parents=True)
    (folder / "refs" / "main").write_text(SECOND)
    (folder / "refs" / "pr" / "1").write_text(FIRST)
    return folder


def test_main_or_another_revision(cached: Path) -> None:
    for name in ("Owner/Name", "Owner/Name/", "Owner/Name@main/"):
        assert find_model(name) == cached / "snapshots" / SECOND
    for revision in (FIRST, FIRST[:7], "pr/1"):
        assert find_model(f"Owner/Name@{revision}") == cached / "snapshots" / FIRST
    for revision in (FIRST[:6], "v2", "../../refs/main"):
        with pytest.raises(ModelError, match="there is no folder"):
            find_model(f"Owner/Name@{revision}")
    (cached / "refs" / "main").unlink()
    with pytest.raises(ModelError, match="no such model"):
        find_model("Owner/Name")
    for part in (cached / "snapshots" / FIRST).iterdir():
        part.unlink()
    (cached / "snapshots" / FIRST).rmdir()
    assert find_model("Owner/Name") == cached / "snapshots" / SECOND, "the only one there is"


def test_missing_parts_raise_with_the_download_command(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="download it with `hf download Qwen/Qwen3-0.6B --revision v1`"):
        find_model("Qwen/Qwen3-0.6B@v1")
    (cached / "snapshots" / SECOND / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer: download all of it with `hf download Owner/Name`"):
        find_model("Owner/Name")
    with pytest.raises(ModelError, match="download it with `hf download gpt2`, or give a folder"):
        find_model("gpt2")
    cached.rename(cached.with_name("models--Name"))
    with pytest.raises(ModelError, match="the copy of Name in the Hugging Face cache has no tokenizer"):
        find_model("Name")
    for place in ("/Owner/Name", "../Owner/Name", "a/b/c"):
        with pytest.raises(ModelError, match="there is no folder .*: give a folder with config.json"):
            find_model(place)
    monkeypatch.chdir(cached.parent)
    (cached.parent / "Owner" / "Name").mkdir(parents=True)
    assert find_model("Owner/Name") == Path("Owner/Name"), "a folder goes first"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "/y")
    assert cache_folder() == Path("/y/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "~/z")
    assert cache_folder() == tmp_path / "z"
