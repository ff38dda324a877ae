"""Models converted for CTranslate2, kept on disk, with what is known of their translations.

The folder `ctranslate2` of the cache has a folder for each model, named by all that it depends on,
and small files beside it: for each search, how many lines CTranslate2 translated as torch did, and
how fast both were.
Only what this user alone can have written is used. Everything in it may be deleted at any time.
"""

import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer_tools.files import (
    CACHE_VARIABLE,
    checksum,
    naming_full_disk,
    scratch_folder,
    write_lines,
)
from vanilla_transformer_tools.saved_folder import (
    FILES_FILE,
    TARGET_FILES,
    describe_files,
    describe_model_files,
    read_object,
)
from vanilla_transformer_tools.translation.search import Search

# Models in the cache; those that were not used for longest are deleted.
MOST_MODELS = 8
# Finds damage, and is fast enough to be computed whenever a model is loaded.
_DIGEST = "xxh3_128"
# What a conversion depends on, besides weights and vocabularies.
_SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", TARGET_FILES[1])
# Folders that others cannot write to: what they put there would be translated with.
_OWN_MODE = 0o700
_CONVERTER = Path(__file__).with_name("ctranslate2_conversion.py")


def cache_folder() -> Path | None:
    """Where this package keeps what it can make again; None if nothing may be kept."""
    given = os.environ.get(CACHE_VARIABLE)
    if given == "":
        return None
    try:
        if given:
            return Path(given).expanduser()
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        # The user of a container may have no home.
        return None
    return caches / "vanilla_transformer"


@dataclass(frozen=True)
class Agreement:
    """How the translations of CTranslate2 compare with those of torch, so far.

    Attributes:
        lines: Lines that were compared.
        differs: Whether one of them was translated otherwise.
        seconds: That CTranslate2 took.
        torch_seconds: That torch took.
    """

    lines: int = 0
    differs: bool = False
    seconds: float = 0.0
    torch_seconds: float = 0.0


class Conversion:
    """One model in the cache, which may not be there yet.

    Attributes:
        folder: Of the converted model.

    Args:
        cache: Folder of all models.
        source: Folder of the model to convert.
    """

    def __init__(self, cache: Path, source: Path) -> None:
        self._source, self._key = source, _key(source)
        self.folder = cache / "ctranslate2" / self._key

    def is_whole(self) -> bool:
        """Whether the converted model is there, as this user wrote it."""
        try:
            if not (_is_own(self.folder.parent) and _is_own(self.folder)):
                return False
            return read_object(self.folder / FILES_FILE) == self._record(self.folder)
        except (OSError, ValueError):
            return False

    def make(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Converts the model, in place of what is there.

        Args:
            model: In float32.
            tokenizer: Of the source.

        Raises:
            ValueError: If CTranslate2 cannot hold the model.
            OSError: If the cache cannot be written or others can write there, or the model's files
                have changed.
        """
        from vanilla_transformer_tools.translation.ctranslate2_conversion import convert_loaded

        parent = self.folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        with suppress(PermissionError):
            parent.chmod(_OWN_MODE)
        if not _is_own(parent):
            raise OSError(
                f"Others can write to {str(parent)!r}. Set {CACHE_VARIABLE} to a folder of yours."
            )
        hint = f"Make room there, or set {CACHE_VARIABLE} to another folder."
        with (
            naming_full_disk(parent, "the conversion for CTranslate2", hint),
            scratch_folder(parent, ".new-") as scratch,
        ):
            new = scratch / "new"
            convert_loaded(model, tokenizer, new)
            if _key(self._source) != self._key:
                raise OSError(f"{str(self._source)!r} was changed while it was loaded.")
            new.chmod(_OWN_MODE)
            write_lines(new / FILES_FILE, [json.dumps(self._record(new), indent=2)])
            # Another process may have been faster.
            if not self.is_whole():
                if self.folder.exists():
                    self.folder.rename(scratch / "old")
                new.rename(self.folder)
        _delete_oldest(parent)

    def _record(self, folder: Path) -> dict[str, Any]:
        """Size and checksum of each file, and what they were converted from."""
        files = describe_files(folder, _names(folder), _DIGEST)
        return {**files, "source": {"key": self._key}}

    def mark_used(self) -> None:
        """Keeps the model among those that were used last."""
        with suppress(OSError):
            os.utime(self.folder)

    def agreement(self, search: Search) -> Agreement:
        """What is known of a search with this model; nothing if its file is damaged."""
        try:
            values = read_object(self._agreement_file(search))
            return Agreement(
                int(values["lines"]),
                bool(values["differs"]),
                float(values["seconds"]),
                float(values["torch_seconds"]),
            )
        except (OSError, ValueError, TypeError, KeyError):
            return Agreement()

    def keep_agreement(self, search: Search, agreement: Agreement) -> None:
        """Writes it, if the cache can be written; otherwise it is found out again."""
        with suppress(OSError):
            write_lines(self._agreement_file(search), [json.dumps(asdict(agreement))])

    def _agreement_file(self, search: Search) -> Path:
        versions = [torch.__version__, version("vanilla-transformer")]
        key = _digest([asdict(search), versions, torch.get_num_threads()])
        return self.folder.with_name(f"{self.folder.name}-{key}.json")


def _is_own(folder: Path) -> bool:
    """Whether nobody but this user can have put something into a folder."""
    if sys.platform == "win32":
        # Folders of users are closed to others there, and modes say nothing.
        return True
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _key(source: Path) -> str:
    """Digest of the files that a conversion depends on, and of the converters' versions."""
    files = describe_model_files(source, _DIGEST)
    files |= describe_files(
        source, (name for name in _SETTINGS if (source / name).exists()), _DIGEST
    )
    return _digest([files, version("ctranslate2"), checksum(_CONVERTER)])


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _names(folder: Path) -> list[str]:
    """Files of a converted model."""
    return sorted(set(os.listdir(folder)) - {FILES_FILE})


def _delete_oldest(parent: Path) -> None:
    with suppress(OSError):
        models = [path for path in parent.glob("[!.]*") if path.is_dir()]
        models.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for old in models[MOST_MODELS:]:
            shutil.rmtree(old, ignore_errors=True)
            for file in parent.glob(f"{old.name}-*.json"):
                file.unlink(missing_ok=True)
