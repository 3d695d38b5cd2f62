"""What a run saved beside its tensors: earlier versions are read, nonsense is refused."""

import pytest

from torchemo.core.errors import CheckpointError
from torchemo.runs.storage.info import events_of, plain_progress, progress_of
from torchemo.runs.storage.manifest import Manifest
from torchemo.training.progress import Progress


def manifest(progress):
    return Manifest(4, "", {}, {"progress": progress}, {})


def test_progress_is_read_as_it_was_saved():
    progress = Progress(best_step=3, best_score=0.5, without_help=2)
    assert progress_of(manifest(plain_progress(progress))) == progress


def test_progress_of_a_run_of_an_earlier_version_is_read():
    saved = plain_progress(Progress(best_step=3, best_score=0.5))
    del saved["without_help"]
    assert progress_of(manifest(saved)) == Progress(best_step=3, best_score=0.5)


@pytest.mark.parametrize("change", [{"without_help": -1}, {"without_help": "x"}, {"other": 1}])
def test_progress_that_no_run_has_is_refused(change):
    with pytest.raises(CheckpointError, match="its progress"):
        progress_of(manifest({**plain_progress(Progress()), **change}))


@pytest.mark.parametrize("events", [-1, 1.0, True, "3", None])
def test_a_number_of_events_that_no_log_has_is_refused(events):
    with pytest.raises(CheckpointError, match="number of its events"):
        events_of(Manifest(4, "", {}, {"events": events}, {}))


def test_a_run_of_an_earlier_version_counted_no_events():
    assert events_of(manifest({})) == 0
