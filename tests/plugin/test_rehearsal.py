"""Releases of Transformers that come after this one; see `checks/rehearse_release.py`."""

import re

import pytest

from rehearse_release import Change, changes, is_allowed, rehearsed
from vanilla_transformer import releases
from vanilla_transformer.releases import NEWEST, OLDEST


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(6))
def test_release_without_a_name_works_or_says_which_releases_do(part):
    effects = {change.title: effect for change, effect in rehearsed(changes()[part::6])}

    assert len(effects) > 6
    assert {title: effect for title, effect in effects.items() if not is_allowed(effect)} == {}


@pytest.mark.slow
def test_rehearsal_reaches_what_it_renames_and_sees_other_results():
    planned = {change.title: change for change in changes()}
    renamed = [
        planned["PreTrainedModel._init_weights"],
        planned["transformers.masking_utils.create_causal_mask"],
        # In the saved folder it is still `encoder_layers`.
        Change("the number of layers", "encoder_layers"),
    ]

    of_method, of_function, of_field = (effect for _, effect in rehearsed(renamed))

    assert "`_init_weights_of_tomorrow`" in of_method
    assert "create_causal_mask" in of_function
    assert not is_allowed(of_field)


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
