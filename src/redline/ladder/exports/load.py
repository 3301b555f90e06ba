"""Loads an artifact that `redline export` wrote."""

import os
from pathlib import Path

from redline.errors import ModelError
from redline.ladder.exports.artifact_form import ArtifactForm, plan_of
from redline.ladder.exports.forms import FORMS
from redline.ladder.exports.manifest import Manifest, check_machine
from redline.ladder.job import Applied, Job
from redline.ladder.plan import Plan
from redline.machine.machine import Machine


class LoadedModel(Applied):
    """A loaded artifact, called like the model of its workload, without gradients. `manifest` describes the export."""

    def __init__(self, job: Job, manifest: Manifest) -> None:
        super().__init__(job)
        self.manifest = manifest

    @property
    def plan(self) -> Plan:
        return plan_of(self.manifest)


def load_exported(path: str | os.PathLike[str]) -> LoadedModel:
    """Loads an artifact of `redline export`: an AOTInductor package, an ONNX file or a folder.

    The model is called like the workload's model, with inputs of the exported shapes and dtypes, on the exported
    device. Raises a `RedlineError` if the artifact has changed since its export or cannot run on this machine, and
    warns if it was made with other versions or on another kind of machine.

    An artifact contains compiled code, which is run: load only artifacts that you trust.
    """
    path = Path(path)
    form, manifest = read_artifact(path)
    machine = Machine.detect(manifest.device)
    check_machine(manifest, machine, str(path), form.compiled)
    return LoadedModel(form.load(path, manifest, machine), manifest)


def read_artifact(path: Path) -> tuple[ArtifactForm, Manifest]:
    """Returns the form and the manifest of an artifact, whose files were compared with the digests in its manifest."""
    if not path.exists():
        raise ModelError(f"there is no artifact {str(path)!r}.")
    for form in FORMS.values():
        if path.is_dir() == (not form.suffix):
            manifest = form.read(path)
            if manifest is not None and manifest.form == form.name:
                return form, manifest
    raise ModelError(f"{str(path)!r} is not an artifact of `redline export PLAN WORKLOAD`: it has no manifest.")
