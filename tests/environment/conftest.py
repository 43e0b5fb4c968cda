import pytest

from tests.environment.pools import Maker


@pytest.fixture
def own(tmp_path, monkeypatch) -> Maker:
    """Makes the spec of an environment from its source; the module is on the driver's search path."""
    monkeypatch.syspath_prepend(tmp_path)
    return Maker(tmp_path)
