"""Rollout: the rollouter samples from engines (`engine/`), plays episodes (`episodes/`) and scores completions.

SGLang's flags are in `engine/server_args.py`, sampling in `requests.py` and `engine/client.py`. A step's metrics are
those of `app/placement/step_metrics.py`.
"""
