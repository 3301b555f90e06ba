"""The bundled language model is found by name, and by default."""

from pathlib import Path

import pytest

from redline.errors import ModelError
from redline.generation.folder import find_model
from redline.models.decoder import bundled


def test_bundled_models_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "WEIGHTS", tmp_path / "weights")
    with pytest.raises(ModelError, match="'talk-small': no language model comes with this version"):
        find_model(None)
    (tmp_path / "weights/talk-small").mkdir(parents=True)
    assert bundled.bundled_language_models() == {}
    (tmp_path / "weights/talk-small/config.json").write_text("{}")
    folder = tmp_path / "weights/talk-small"
    assert find_model(None) == find_model("talk-small") == bundled.bundled_language_model() == folder
    with pytest.raises(ModelError, match="'talk-large': the bundled models are talk-small"):
        bundled.bundled_language_model("talk-large")
    # A folder of that name comes first.
    monkeypatch.chdir(tmp_path)
    Path("talk-small").mkdir()
    assert find_model("talk-small") == Path("talk-small")


@pytest.mark.skipif(not bundled.bundled_language_models(), reason="the weights are not trained yet")
def test_the_bundled_model_is_small_and_answers() -> None:
    from redline.generation.talk_evaluation import evaluate_talk

    folder = bundled.bundled_language_model()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_000_000
    found = evaluate_talk(topics=["arithmetic", "memory", "facts"], samples=8, device="cpu")
    assert found.is_meaningful and found.total.accuracy > 0.7
