"""Float32 matrix products of oneDNN over torch's own, MKL's.

    python -m tests.bench.matmul [--rounds N] [--out FILE]

The shapes are those of an engine's decode step and of a trainer's forward and backward pass.
"""

import time
from collections.abc import Callable

import torch

from app.cpu_engine.matmul import multiply
from tests.bench.machine import Options, busy, conditions, machine, publish, spread

WIDTH, WIDER = 256, 1536  # of a layer
DECODED, TRAINED = 38, 2048  # requests of a decode step, tokens of a microbatch
SECONDS = 0.5  # of a measurement


def factors() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the factors of a layer's products, in their layouts."""
    decoded, w = torch.randn(DECODED, WIDTH), torch.randn(WIDER, WIDTH)
    x, g = torch.randn(TRAINED, WIDTH), torch.randn(TRAINED, WIDER)
    return {
        f"decoding {DECODED} requests": (decoded, w.t()),
        f"forward pass of {TRAINED:,} tokens": (x, w.t()),
        "their gradient": (g, w),
        "the weight's gradient": (g.t(), x),
    }


def gflops(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> float:
    for _ in range(3):
        multiply(a, b)
    started, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < SECONDS:
        for _ in range(10):
            multiply(a, b)
        count += 10
    return 2 * a.shape[0] * b.numel() * count / seconds / 1e9


def main() -> None:
    given, _ = Options(__doc__).parse()
    torch.manual_seed(0)
    before = conditions()
    results = {}
    for product, (a, b) in factors().items():
        rounds = [(gflops(multiply, a, b), gflops(torch.mm, a, b)) for _ in range(given.rounds)]
        results[product] = {
            "onednn_gflops": spread((onednn for onednn, _ in rounds), 0),
            "mkl_gflops": spread((mkl for _, mkl in rounds), 0),
            "onednn_over_mkl": spread((onednn / mkl for onednn, mkl in rounds), 2),
        }
    result = {
        "what": "matmul",
        "rounds": given.rounds,
        "threads": torch.get_num_threads(),
        "products": results,
        "machine": machine("torch"),
        "before": before,
        "busy": busy([before]),
    }
    publish(result, given.out)


if __name__ == "__main__":
    main()
