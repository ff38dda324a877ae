"""Lines with which a reader can try a model."""

from itertools import islice
from pathlib import Path

from vanilla_transformer_tools.files import checksum, read_lines
from vanilla_transformer_tools.saved_folder import read_card_metadata, read_run

MOST_EXAMPLES = 6
# A longer line would not fit on a button.
_LONGEST = 200


def find_examples(name: str) -> list[str]:
    """Examples of a model: from its card, else the first lines of its validation data.

    Args:
        name: Folder or Hub name. Its validation data are found near it, or in the working folder,
            and recognised by the checksum that its training recorded.
    """
    # Where the Hub looks for examples, too.
    widgets = read_card_metadata(name).get("widget")
    texts = [
        widget.get("text")
        for widget in (widgets if isinstance(widgets, list) else [])
        if isinstance(widget, dict)
    ]
    if texts := [text for text in texts if isinstance(text, str) and text.strip()]:
        return texts[:MOST_EXAMPLES]
    run = read_run(name)
    source, *_ = (run.get("settings") or {}).get("validation") or [""]
    recorded = (run.get("sha256") or {}).get(source)
    for place in (Path(), Path(name), Path(name).parent):
        file = place / source
        if recorded and file.is_file() and checksum(file) == recorded:
            return read_examples(str(file))
    return []


def read_examples(path: str) -> list[str]:
    """The first lines of a file that are neither blank nor long.

    Raises:
        ValueError: If it cannot be read as text.
        OSError: If it is not there.
    """
    lines = (line for line in read_lines(path) if line.strip() and len(line) <= _LONGEST)
    return list(islice(lines, MOST_EXAMPLES))
