"""Small trainers compute faster on one thread."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def on_one_thread(one_thread: None) -> None: ...
