"""Releases of Transformers that come after this one; see `checks/rehearse_release.py`."""

import re

import pytest

from rehearse_release import Change, changes, is_allowed, rehearsed
from vanilla_transformer import releases
from vanilla_transformer.releases import NEWEST, OLDEST


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_release_without_a_name_works_or_says_which_releases_do():
    planned = changes()
    effects = {change.title: effect for change, effect in rehearsed(planned)}

    assert len(effects) == len(planned) > 40
    assert {title: effect for title, effect in effects.items() if not is_allowed(effect)} == {}
    # The rehearsal reaches what it renames.
    assert "`_init_weights_of_tomorrow`" in effects["PreTrainedModel._init_weights"]
    assert "create_causal_mask" in effects["transformers.masking_utils.create_causal_mask"]


@pytest.mark.slow
def test_rehearsal_sees_other_results():
    # In the saved folder it is still `encoder_layers`.
    ((_, effect),) = rehearsed([Change("the number of layers", "encoder_layers")])

    assert not is_allowed(effect)


def test_missing_name_ends_with_the_range_of_releases(monkeypatch):
    class Ours(releases.PreTrainedModel):
        def train(self, modus=True):
            pass

    monkeypatch.setattr(Ours, "__module__", "vanilla_transformer.ours")
    monkeypatch.setattr(releases, "NEEDED", ((dict, ("keys", "_gone")),))

    with pytest.raises(
        ImportError, match=re.escape(f"Transformers {OLDEST} to {NEWEST}")
    ) as raised:
        releases.check(Ours)

    assert "it lacks `_gone`, `train(mode=)`." in str(raised.value)
