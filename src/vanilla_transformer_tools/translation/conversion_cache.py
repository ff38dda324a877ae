"""Models converted for CTranslate2, kept on disk.

The folder `ctranslate2` of the cache has a folder for each model, named by all that it depends on.
Only files that nobody else can have written are used. All may be deleted at any time.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer_tools.files import (
    CACHE_VARIABLE,
    checksum,
    delete_oldest,
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
    """Folder for files that this package can make again; None if nothing may be kept."""
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


class Conversion:
    """One model in the cache, which may not be there yet.

    Attributes:
        folder: Folder of the converted model.

    Args:
        cache: Folder of all models.
        source: Folder of the model to convert.
    """

    def __init__(self, cache: Path, source: Path) -> None:
        self._source, self._key = source, _key(source)
        self.folder = cache / "ctranslate2" / self._key

    def agrees(self) -> bool | None:
        """Whether CTranslate2 translated a sample with it as torch did.

        Returns:
            None if there is no conversion, or not as this user wrote it.
        """
        try:
            if not (_is_own(self.folder.parent) and _is_own(self.folder)):
                return None
            recorded = read_object(self.folder / FILES_FILE)
            agrees = bool(recorded.pop("agrees"))
            return agrees if recorded == self._record(self.folder) else None
        except (OSError, ValueError, KeyError):
            return None

    def make(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        agrees: Callable[[Path], bool],
    ) -> None:
        """Converts the model, replacing an earlier conversion.

        Args:
            model: The model, in float32.
            tokenizer: Tokenizer of the source.
            agrees: Compares the translations of a converted model with torch's.

        Raises:
            ValueError: If CTranslate2 cannot hold the model.
            OSError: If the cache cannot be written or others can write there, or the model's files
                have changed.
        """
        from vanilla_transformer_tools.translation.ctranslate2_conversion import convert

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
            convert(model, tokenizer, new)
            if _key(self._source) != self._key:
                raise OSError(f"{str(self._source)!r} was changed while it was loaded.")
            new.chmod(_OWN_MODE)
            record = {**self._record(new), "agrees": agrees(new)}
            write_lines(new / FILES_FILE, [json.dumps(record, indent=2)])
            # Another process may have been faster.
            if self.agrees() is None:
                if self.folder.exists():
                    self.folder.rename(scratch / "old")
                new.rename(self.folder)
        delete_oldest(parent.glob("[!.]*"), MOST_MODELS)

    def _record(self, folder: Path) -> dict[str, Any]:
        """Size and checksum of each file, and their sources."""
        names = sorted(set(os.listdir(folder)) - {FILES_FILE})
        return {**describe_files(folder, names, _DIGEST), "source": {"key": self._key}}


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
    about = [files, version("ctranslate2"), checksum(_CONVERTER)]
    return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
