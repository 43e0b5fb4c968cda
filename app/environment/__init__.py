"""Environments: tasks of several turns, run in worker processes that may have an interpreter of their own.

    driver   EnvironmentPool ── tokens, as JSON lines ──→ worker   renderer ⇄ policy ⇄ environment.run(task, policy)

Invariants:
- A token is trained on only if an engine sampled it, and on exactly the tokens that the engine saw.
- The driver sees tokens; an environment sees text.
- An episode ends exactly once, as scored, failed or aborted, and its environment is closed then.

`pool` runs in the driver. All other modules also run in a worker, where they import only the standard
library at first: the packages of an adapter are imported where they are used.
"""
