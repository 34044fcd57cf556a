"""Fetching a run from a store into a local folder: small files, and the newest complete checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clipzoo.io.files import below, whole
from clipzoo.io.stores import filesystem
from clipzoo.io.stores.filesystem import ChangedError, TruncatedError
from clipzoo.io.stores.lease import writer
from clipzoo.io.stores.record import Record
from clipzoo.io.stores.store import Store
from clipzoo.io.stores.tree import FINISHED, Group, Tree, Version, local_files, stated_digests, tree_of, version_of

log = logging.getLogger(__name__)

THREADS = 8


def refresh(store: Store, folder: Path, last: str | None = None) -> None:
    """Bring the plain files of a run and the marks of its checkpoints up to date, unless the local copy is newer.

    The local copy is newer if no other copy has written to the store since, or if it has a later checkpoint of an
    unfinished run.

    last: id of the copy that was the last to write; None: the store says.
    """
    sizes = store.sizes()
    here, there, record = tree_of(local_files(folder)), tree_of(sizes), Record(folder)
    last = last or (writer(store) or {}).get("id")
    if not sizes or is_newer(here, there, record.id is not None and last == record.id):
        return
    marks = [group.mark for group in there.groups.values() if group.name not in here.groups]
    names = [name for name in (*there.plain, *marks) if not name.rpartition("/")[2].startswith(".")]
    _download(store, folder, {name: sizes[name] for name in names})
    record.add(*_versions(folder, [name for name in there.plain if name in names]))
    for name in set(here.plain) - set(there.plain):
        # Removed by another machine, such as the results of a run that continues.
        below(folder, name).unlink(missing_ok=True)


def is_newer(here: Tree, there: Tree, was_last: bool) -> bool:
    """Return True if the local copy of a run is newer. was_last: no other copy has written to the store since."""
    if was_last:
        return True
    return FINISHED not in there.plain and _newest_name(here) > _newest_name(there)


def fetch_newest(store: Store, folder: Path) -> list[str]:
    """Fetch what a run needs to resume: its newest complete checkpoint, and pairs of files outside of `checkpoints`.

    A checkpoint whose content does not have the digests of its mark is named in the log, and the one before is fetched.
    Returns the names of the local ones.
    """
    sizes, here = store.sizes(), tree_of(local_files(folder)).series()
    there = tree_of(sizes).series()
    found = []
    for series in sorted({*here, *there}):
        if series == "best" or series.startswith("ended_at"):
            continue
        local = here.get(series, [])
        newest = local[-1].name if local else ""
        later = [group for group in there.get(series, []) if group.name > newest]
        fetched = next((group.name for group in reversed(later) if fetch_group(store, folder, group, sizes)), newest)
        found += [fetched] if fetched else []
    return found


def fetch_group(store: Store, folder: Path, group: Group, sizes: Mapping[str, int]) -> bool:
    """Fetch one checkpoint, its mark last. Return False, with a warning, if the store's copy is damaged."""
    record = Record(folder)
    *others, mark = group.files
    if group.name in tree_of(local_files(folder)).groups:
        return True
    below(folder, mark).unlink(missing_ok=True)
    stated = stated_digests(lambda name: store.read(name) or b"", group.files)
    try:
        for name in others:
            digest = store.download(name, sizes[name], below(folder, name))
            if digest != stated.get(name, digest):
                raise TruncatedError(f"the SHA-256 of {name} differs from the one in {mark}")
    except (ChangedError, TruncatedError, FileNotFoundError) as error:
        log.warning("checkpoint %s/%s is not used: %s", store.url, group.name, error)
        for name in others:
            below(folder, name).unlink(missing_ok=True)
        return False
    store.download(mark, sizes[mark], below(folder, mark))
    record.add(*_versions(folder, group.files))
    return True


def _download(store: Store, folder: Path, sizes: Mapping[str, int]) -> None:
    """Fetch single files. One that has been removed since it was listed is left out."""

    def one(name: str) -> None:
        try:
            # Files that grow are small; a large one is written once.
            if sizes[name] > filesystem.RANGE:
                store.download(name, sizes[name], below(folder, name))
            else:
                content = store.read_whole(name)
                with whole(below(folder, name)) as file:
                    file.write(content)
        except FileNotFoundError:
            log.info("%s/%s was removed in the meantime", store.url, name)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, sizes))


def _versions(folder: Path, names: Iterable[str]) -> list[tuple[str, Version]]:
    found = ((name, version_of(below(folder, name))) for name in names)
    return [(name, version) for name, version in found if version is not None]


def _newest_name(tree: Tree) -> str:
    groups = tree.series().get("checkpoints", [])
    return groups[-1].name if groups else ""
