"""Training without its picture, whose drawing takes longer than a short run, and few trials."""

import pytest

from vanilla_transformer_tools.training import reports, run


@pytest.fixture(autouse=True)
def little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that a test starts draw nothing, and try two batches; fixtures of a module do more."""
    monkeypatch.setattr(run, "plot_curves", lambda *_: None)
    monkeypatch.setattr(reports, "TRIED_BATCHES", 2)
