"""The store of past visits behind the page: recognise, keep, list, rename, forget."""

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor

from torchemo.data.formats.images import PictureForm
from torchemo.runs.load import Trained
from torchemo.runs.visits import files
from torchemo.runs.visits.returning import (
    Returned,
    check_store,
    fit_again,
    fresh_index,
    recogniser_of,
)
from torchemo.runs.visits.store import Store, reading, writing


@final
class Visits:
    """A store on disk, which is locked only while it is changed; every method is safe in any thread.

    Args:
        trained: The run.
        path: Folder of the store; it is made if there is none.
        run: Folder of the run.
    """

    def __init__(self, trained: Trained, path: Path, *, run: Path) -> None:
        self.trained, self.path = trained, path
        self._lock = threading.Lock()
        # A store of another run, or a place that cannot be written, is refused before the page opens.
        with writing(path, otherwise=fresh_index(trained, run)) as store:
            check_store(trained, store)
            self._recogniser = recogniser_of(trained, run, store.settings)
            if not files.is_store(path):
                files.commit(path, store.index)

    def fit(
        self, classes: Mapping[str, Tensor], form: PictureForm, *, besides: Collection[str]
    ) -> Returned:
        """Fit the run to classes and to their past visits, but those named."""
        with self._lock:
            store = reading(self.path)
            return self._fitted(classes, form, store, besides)

    def _fitted(
        self,
        classes: Mapping[str, Tensor],
        form: PictureForm,
        store: Store,
        besides: Collection[str],
    ) -> Returned:
        recogniser = self._recogniser
        return fit_again(self.trained, classes, form, store, recogniser=recogniser, besides=besides)

    def keep(
        self, classes: Mapping[str, Tensor], form: PictureForm, *, instead_of: Collection[str]
    ) -> str:
        """Keep this visit in the place of others and return its id."""
        with self._lock, writing(self.path) as store:
            before = {visit.id for visit in store.index.visits}
            returned = self._fitted(classes, form, store, instead_of)
            if returned.repeated is not None:
                return returned.repeated.id
            returned.keep(store, instead_of=before & set(instead_of))
            (made,) = {visit.id for visit in store.index.visits} - before
            return made

    def rename(self, old: str, new: str) -> None:
        """Rename a class in all visits."""
        with self._lock, writing(self.path) as store:
            store.rename(old, new)

    def forget(self, name: str) -> None:
        """Forget all visits in which a class had a part."""
        with self._lock, writing(self.path) as store:
            store.forget(classes=[name])

    @property
    def listing(self) -> dict[str, Any]:
        """Return what the page shows of the store."""
        with self._lock:
            store: Store = reading(self.path)
        return {
            "name": self.path.resolve().name,
            "visits": len(store),
            "bytes": sum(visit.size for visit in store.index.visits),
            "classes": [line._asdict() for line in store.classes],
        }
