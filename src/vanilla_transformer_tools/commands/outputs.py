"""Checks of an output file before the work begins."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def check_output(
    path: Path, *, inputs: Iterable[str | None] = (), models: Sequence[str] = ()
) -> None:
    """Rejects an output that cannot be written or would overwrite an input of the command.

    Args:
        path: The output; it is not changed.
        inputs: Files that the command reads; None and missing files are ignored.
        models: Folders or Hub names of the models that the command loads.

    Raises:
        ValueError: If it is an input, a file of a model, or a folder.
        OSError: If it cannot be written.
    """
    for name in inputs:
        if name and path.exists() and Path(name).exists() and path.samefile(name):
            raise ValueError(
                f"--output {path} would overwrite {name!r}, which is an input. Choose another file."
            )
    for model in models:
        if _is_file_of(path, Path(model)):
            raise ValueError(
                f"--output {path} would be a file of the model {model!r}. Choose another file."
            )
    if path.is_dir():
        raise ValueError(f"--output must be a file, got the folder {str(path)!r}.")
    if path.exists() and not path.is_file():
        # A device or a pipe.
        return
    check_room(path, "--output")


def write_rows(path: str | None, rows: Iterable[str]) -> None:
    """Writes lines in UTF-8: to a file, whole or not at all, or else to standard output."""
    from vanilla_transformer_tools.files import write_lines
    from vanilla_transformer_tools.translation.streams import opened_output

    if path:
        write_lines(Path(path), rows)
        return
    with opened_output(None) as write:
        for row in rows:
            write(f"{row}\n".encode())


def _is_file_of(path: Path, model: Path) -> bool:
    """Whether an output would be a file of a saved model, itself or through a link."""
    # The name in the folder and what it links to: in the Hub's cache that is a blob elsewhere.
    places = (path.parent.resolve() / path.name, path.resolve())
    inside = [place for place in places if place.is_relative_to(model.resolve())]
    if not inside or not model.is_dir():
        return False
    from vanilla_transformer_tools.saved_folder import is_reserved_name

    return any(map(is_reserved_name, inside))


def check_room(path: Path, option: str) -> None:
    """Rejects a file, which an option names, that cannot be created or replaced.

    Raises:
        OSError: If it cannot.
    """
    from vanilla_transformer_tools.files import scratch_folder

    try:
        # As the file will be written, so that a name that is too long for that fails here.
        with scratch_folder(path.parent, f".{path.name}."):
            pass
        if path.exists():
            path.open("r+b").close()
    except OSError as error:
        raise OSError(
            f"{option} cannot be written to {str(path)!r}: {error.strerror}. Make its folder, or "
            "choose another one."
        ) from error
