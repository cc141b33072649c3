"""Models by name: a folder, a repository on huggingface.co that is downloaded once, or none for the built-in one.

Of a repository with GGUF files, one model is downloaded: `owner/name` if there is but one, else `owner/name:Q4_K_M`, by
the type that the names of files end with, or `owner/name/FILE.gguf`. `@revision` may follow any of these.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from types import ModuleType

from moeflux import files
from moeflux.errors import ArgumentError, Error, FormatError, IoError, NotFoundError
from moeflux.models import builtin
from moeflux.models.config import variant_from_config
from moeflux.models.gguf import SUFFIX
from moeflux.models.gguf_choice import Asked, asked_of, choose_gguf, has_gguf
from moeflux.models.gguf_config import ARCHITECTURES
from moeflux.models.presets import preset
from moeflux.models.published import INDEX, files_of_index, runs_as_published
from moeflux.models.quantised import quantisation_of
from moeflux.progress import Counting, Progress, Silent
from moeflux.sizes import size_text

__all__ = [
    "check_name",
    "download_folder",
    "downloaded_gguf",
    "downloads",
    "find_config",
    "find_downloaded",
    "find_model",
    "is_repository",
]

SECONDS_BETWEEN_LOOKS = 0.25
# The files that a model needs here. Repositories hold the same weights in other formats too, often in folders.
PACKED, EXPERTS = "moeflux.json", "packed_experts"
FILES = ("*.json", "*.jinja", "*.safetensors", "*.md", "model_weights.bin", f"{EXPERTS}/*")


def find_model(name: str | Path | None, progress: Progress | None = None) -> Path:
    """The folder of a model, or its GGUF file: a path, the name of a repository or of a model in it, None for the
    built-in one.

    A folder on the disk wins over a repository of the same name. A download goes to the cache of huggingface_hub, where
    other programs find it too. If it is stopped, the next one continues it.
    """
    check_name(name)
    if name is None:
        return builtin.path()
    asked = asked_of(name)
    if _is_there(name) or asked is None:
        return files.expanded(name)
    progress = progress or Silent()
    with _library(name) as hub:
        try:
            return _download(hub, asked, progress)
        except KeyboardInterrupt:
            progress.note(f"{name}: what is downloaded is kept; the same command goes on from there")
            raise


def find_downloaded(name: str) -> Path | None:
    """What `find_model` gives for a repository that was downloaded earlier; None if it was not, or only a part of
    it."""
    asked = _asked(name)
    with _library(name) as hub:
        try:
            return _earlier(hub, asked)
        except hub.errors.LocalEntryNotFoundError:
            return None


def downloaded_gguf(name: str | Path) -> Path | None:
    """The GGUF file that the name of a repository stands for, if it was downloaded."""
    found = find_downloaded(str(name)) if is_repository(name) else None
    return found if found is not None and found.suffix == SUFFIX else None


def download_folder() -> Path:
    """Where downloads go; the user's own folder where nothing can be downloaded."""
    if find_spec("huggingface_hub") is None:
        return Path.home()
    with _library("the cache of huggingface_hub") as hub:
        return Path(hub.constants.HF_HUB_CACHE)


def downloads() -> list[tuple[str, Path]]:
    """(repository, folder) of every model that was downloaded, in whole or in part, whoever did so. The folder is that
    of the revision that came last."""
    if find_spec("huggingface_hub") is None:
        return []
    with _library("the cache of huggingface_hub") as hub:
        try:
            repositories = hub.scan_cache_dir(download_folder()).repos
        except hub.errors.CacheNotFound:
            return []
        models = sorted((repo for repo in repositories if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
        last = [max(repo.revisions, key=lambda revision: revision.last_modified, default=None) for repo in models]
        return [(repo.repo_id, revision.snapshot_path) for repo, revision in zip(models, last, strict=True) if revision]


def find_config(name: str) -> Path:
    """The config.json of a repository. Only this file is downloaded: it tells what a model is, without its weights.
    GGUF files have no such file."""
    asked = _asked(name)
    alone = FormatError(
        f"{name}: expected the config.json of a repository, found GGUF files alone, which say in themselves what they "
        f"are: `moeflux run {name}` downloads one, and then it is known by the same name"
    )
    if asked.gguf:
        raise alone
    with _library(name) as hub:
        try:
            return Path(hub.hf_hub_download(asked.repository, "config.json", revision=asked.revision))
        except hub.errors.RemoteEntryNotFoundError:
            if not has_gguf(hub.HfApi().list_repo_files(asked.repository, revision=asked.revision)):
                raise
    raise alone


def is_repository(name: str | Path) -> bool:
    """Whether a name is that of a repository, or of a model in one. A folder on the disk wins."""
    return asked_of(name) is not None and not _is_there(name)


def _asked(name: str) -> Asked:
    check_name(name)
    asked = asked_of(name)
    if asked is None:
        raise ArgumentError(f"{name!s:.200}: expected a repository as owner/name")
    return asked


@contextmanager
def _library(name: str | Path) -> Generator[ModuleType, None, None]:
    """Gives huggingface_hub, and turns what it raises into an IoError of one sentence."""
    import huggingface_hub as hub
    from huggingface_hub import constants, errors, utils

    try:
        with _without_bars(utils, constants):
            yield hub
    except Error:
        raise
    except Exception as error:  # of the library, of its HTTP client, of the system: of many kinds
        raise IoError(f"{name}: {_sentence(errors, error)}") from error


@contextmanager
def _without_bars(utils: ModuleType, constants: ModuleType) -> Generator[None, None, None]:
    """Keeps the library from drawing bars beside ours. Where its own variable in the environment decides, it does."""
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def check_name(name: str | Path | None) -> None:
    """Raises the reason if there is no such folder and nothing to download, before anything is read or fetched."""
    if name is None:
        return
    files.path_of(name)
    if _is_there(name):
        return
    if asked_of(name) is None:
        there = "nothing of that name"
        with suppress(ArgumentError):
            preset(str(name))
            there = "only a preset, which has no weights: `moeflux plan`, `moeflux info` and `moeflux bench` take it"
        raise NotFoundError(
            f"{name!s:.200}: expected a folder, a GGUF file or a repository as owner/name, found {there}"
        )
    if find_spec("huggingface_hub") is None:
        raise NotFoundError(
            f"{name}: found no such folder; to download the model of that name from huggingface.co: "
            f'pip install "moeflux[hub]"'
        )


def _is_there(name: str | Path) -> bool:
    try:
        return files.exists(files.expanded(name))
    except Error:  # it can be the name of nothing
        return False


def _download(hub: ModuleType, asked: Asked, progress: Progress) -> Path:
    repository, revision = asked.repository, asked.revision
    try:
        found = hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception as error:
        if isinstance(error, hub.errors.HfHubHTTPError):  # the server was reached, and said no
            raise
        progress.note(f"{repository}: huggingface.co cannot be reached; looking for an earlier download")
        return _earlier(hub, asked)
    sizes = {file.rfilename: file.size or 0 for file in found.siblings}
    wanted = {name: size for name, size in sizes.items() if _is_wanted(name)}
    gguf = choose_gguf(asked, sizes) if _is_of_gguf(asked, sizes) else []
    if gguf:
        _check_architecture(asked, getattr(found, "gguf", None))
        wanted = {name: sizes[name] for name in gguf}
    else:
        _check_kind(hub, repository, found.sha, wanted)
        for name in _beside_the_index(hub, repository, found.sha, wanted):
            del wanted[name]
    missing = {name: size for name, size in wanted.items() if not _is_cached(hub, repository, name, found.sha)}
    if missing:
        _check_space(hub, repository, sum(missing.values()))
        count = f"{len(missing)} files" if len(missing) > 1 else "one file"
        progress.note(f"{asked}: downloading {count}, {size_text(sum(missing.values()))}")
    with _shown(hub, repository, sum(missing.values()), progress):
        # Ask by the name of the revision, not by its commit: then it is found by that name without a network too.
        folder = Path(hub.snapshot_download(repository, revision=revision, allow_patterns=list(map(escape, wanted))))
    return folder / gguf[0] if gguf else folder


def _earlier(hub: ModuleType, asked: Asked) -> Path:
    """What an earlier download brought. The library knows what the repository holds, and has it only if all that is
    asked for is there. Its patterns find files in folders, too, of which only a packed store has any."""
    repository, revision = asked.repository, asked.revision
    folder = Path(hub.snapshot_download(repository, revision=revision, allow_patterns=[], local_files_only=True))
    found = filter(files.is_file, files.listed(folder, "**/*.*"))
    here = {str(file.relative_to(folder)): files.size_of(file) for file in found}
    if _is_of_gguf(asked, here):
        try:
            return folder / choose_gguf(asked, here)[0]
        except FormatError as error:
            if not asked.gguf:  # several models are here
                raise
            raise hub.errors.LocalEntryNotFoundError(str(error)) from error
        except NotFoundError as error:
            raise hub.errors.LocalEntryNotFoundError(str(error)) from error
    cached = {
        name: found
        for name in (PACKED, INDEX)
        if isinstance(found := hub.try_to_load_from_cache(repository, name, revision=revision), str)
    }
    shards = files_of_index(Path(cached[INDEX])) if INDEX in cached else ["*.safetensors"]
    wanted = [*(pattern for pattern in FILES if pattern != "*.safetensors"), *shards]
    others = None if PACKED in cached else ["*/*"]
    folder = hub.snapshot_download(
        repository, revision=revision, allow_patterns=wanted, ignore_patterns=others, local_files_only=True
    )
    return Path(folder)


def _is_of_gguf(asked: Asked, names: Iterable[str]) -> bool:
    """Whether a GGUF file is meant: one was named, or there are no other weights that could be."""
    others = any(name == PACKED or (_is_wanted(name) and name.endswith(".safetensors")) for name in names)
    return asked.gguf or (not others and has_gguf(names))


def _check_architecture(asked: Asked, said: object) -> None:
    """Refuses, before gigabytes are fetched, what the hub says of GGUF files that do not run here."""
    architecture = said.get("architecture") if isinstance(said, dict) else None
    if isinstance(architecture, str) and architecture not in ARCHITECTURES:
        expected = ", ".join(sorted(ARCHITECTURES))
        raise FormatError(f"{asked}: expected GGUF files of one of {expected}, found those of {architecture:.60}")


def _is_wanted(name: str) -> bool:
    inside = name.rpartition("/")[0] in ("", EXPERTS)
    return inside and any(fnmatchcase(name, pattern) for pattern in FILES)


def _beside_the_index(hub: ModuleType, repository: str, revision: str, names: Iterable[str]) -> list[str]:
    """The safetensors files that the index does not name: copies of the weights for other programs."""
    if INDEX not in names:
        return []
    used = files_of_index(Path(hub.hf_hub_download(repository, INDEX, revision=revision)))
    return [name for name in names if name.endswith(".safetensors") and name not in used]


@contextmanager
def _shown(hub: ModuleType, repository: str, total: int, progress: Progress) -> Generator[None, None, None]:
    """Shows how much of `total` has arrived since the `with` began, by the sizes of the files in the cache. Every
    version of the library writes them there, while its own ways of telling differ."""
    blobs = Path(hub.constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
    before, ended = _bytes_in(blobs), Event()
    with Counting(progress, repository) as counting:

        def watch() -> None:
            done = 0
            while not ended.wait(SECONDS_BETWEEN_LOOKS):
                with suppress(Error):  # it is only looked at here
                    done = max(done, min(_bytes_in(blobs) - before, total - 1))
                counting(done, total)

        watching = Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()


def _bytes_in(folder: Path) -> int:
    if not files.is_folder(folder):
        return 0
    found = (files.status_of(file) for file in files.listed(folder, "*"))  # None: renamed meanwhile
    return sum(status.st_size for status in found if status is not None)


def _check_kind(hub: ModuleType, repository: str, revision: str, sizes: dict[str, int]) -> None:
    """Refuses, before gigabytes are fetched, a model that does not run here as it is."""
    if PACKED in sizes:
        return
    weights = [name for name in sizes if name.endswith(".safetensors")]
    if not weights or "config.json" not in sizes:
        raise FormatError(
            f"{repository}: expected weights (config.json and *.safetensors), GGUF files or a packed store "
            f"(moeflux.json), found none of these"
        )
    config = Path(hub.hf_hub_download(repository, "config.json", revision=revision))
    variant = variant_from_config(config)  # FormatError where the architecture is another
    fields = files.read_json(config)
    if "quantization" in fields or runs_as_published(fields):
        return
    quantisation_of(config.parent, fields)  # FormatError where it cannot be converted either
    raise FormatError(
        f"{repository}: expected weights that run as they are published, found a checkpoint of {variant.model_type} "
        f"({size_text(sum(sizes[name] for name in weights))}) that needs converting: download it "
        f"(hf download {repository}), then `moeflux convert` makes a store of it"
    )


def _is_cached(hub: ModuleType, repository: str, name: str, revision: str) -> bool:
    return isinstance(hub.try_to_load_from_cache(repository, name, revision=revision), str)


def _check_space(hub: ModuleType, repository: str, needed: int) -> None:
    free = files.free_bytes(hub.constants.HF_HUB_CACHE)
    if needed > free:
        raise IoError(
            f"{repository}: needs {size_text(needed)} in {hub.constants.HF_HUB_CACHE}, found {size_text(free)} free "
            f"(HF_HOME sets another place)"
        )


def _sentence(errors: ModuleType, error: Exception) -> str:
    """One sentence for the kind of error: the library's own messages are paragraphs."""
    if isinstance(error, errors.GatedRepoError):
        return "its owner must be asked first: accept the licence on its page, then `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "found neither such a folder nor such a repository on huggingface.co"
    if isinstance(error, errors.RevisionNotFoundError):
        return "found the repository on huggingface.co, but not that revision of it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "found no earlier download of it, and huggingface.co cannot be reached"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
