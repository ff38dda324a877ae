"""What several tests of other runtimes share."""

import pytest

from vanilla_transformer_tools.interop.web import _TRANSFORMERS

from ..support.node import install


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    """A folder where node finds the transformers.js of the page."""
    return install(tmp_path_factory.mktemp("node"), _TRANSFORMERS)
