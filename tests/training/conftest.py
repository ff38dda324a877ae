"""Training without its picture, whose drawing takes longer than a short run, and few trials."""

from collections.abc import Iterator

import pytest

from vanilla_transformer_tools.training import reports, run


@pytest.fixture(scope="package", autouse=True)
def little_to_do() -> Iterator[None]:
    """Runs draw nothing, and try two batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "plot_curves", lambda *_: None)
        patch.setattr(reports, "TRIED_BATCHES", 2)
        yield
