"""Lists the forms of an artifact, and chooses one by the name of the artifact."""

from pathlib import Path

from redline.errors import RedlineError
from redline.ladder.exports.aot_package import AotPackage
from redline.ladder.exports.artifact_form import ArtifactForm
from redline.ladder.exports.folder import Folder
from redline.ladder.exports.onnx_file import OnnxFile

FORMS: dict[str, ArtifactForm] = {form.name: form for form in (AotPackage(), OnnxFile(), Folder())}


def form_for(out: str) -> ArtifactForm:
    """Returns the form for an artifact of this name: by its suffix, or a folder if it has no suffix."""
    suffix = Path(out).suffix.lower()
    if out.endswith("/") or not suffix or Path(out).is_dir():
        return FORMS["folder"]
    for form in FORMS.values():
        if form.suffix and suffix == form.suffix:
            return form
    raise RedlineError(
        f"cannot export to {out!r}: a name ends in .pt2 (AOTInductor package) or .onnx, or has no suffix (a folder; "
        "end a folder's name that has a dot with a slash)."
    )
