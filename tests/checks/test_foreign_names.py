"""`checks/foreign_names.py`: names of other libraries that the plug-in touches."""

from foreign_names import touched_names
from private_names import REASONS


def test_each_private_name_has_a_reason():
    private = {touched.name for touched in touched_names() if touched.door == "private"}

    assert private == REASONS.keys()
    assert all(REASONS.values())
