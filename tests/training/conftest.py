"""Training without its picture, whose drawing takes longer than a short run."""

import pytest

from vanilla_transformer_tools.training import run


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that a test starts draw nothing; those of fixtures for a whole module do."""
    monkeypatch.setattr(run, "plot_curves", lambda *_: None)
