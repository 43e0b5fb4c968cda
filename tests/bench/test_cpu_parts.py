"""CPU time is that of all threads, and its parts are packages of `app`."""

import threading
import time

from app.algorithm.metrics import pass_at_k
from tests.bench.cpu_parts import cpu_time


def burn(seconds: float) -> None:
    """Use CPU time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def burn_in_app(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass_at_k.__wrapped__(1000, 10, 500)


def test_other_threads_count_and_are_told_from_the_main_thread() -> None:
    with cpu_time() as spent:
        thread = threading.Thread(target=burn, args=(0.3,))
        thread.start()
        thread.join()
    assert spent.process >= 0.3
    assert spent.other_threads >= 0.29
    assert spent.main_thread <= spent.process - 0.29


def test_the_parts_are_the_packages_in_which_the_main_thread_was() -> None:
    with cpu_time(sampled=True) as spent:
        burn_in_app(0.6)
        burn(0.2)
    parts = spent.parts
    assert next(iter(parts)) == "algorithm.metrics"
    assert parts["algorithm.metrics"] > parts["simulation"] > 0
    assert abs(sum(parts.values()) - spent.main_thread) < 1e-9
