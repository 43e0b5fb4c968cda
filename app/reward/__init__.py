'''Rewards: score completions.

A custom reward is an importable Python function, named in the configuration:

    python -m app reward._target_=my_rewards.short_and_right +reward.args.limit=200

    # my_rewards.py, in the working directory or anywhere else on PYTHONPATH
    def short_and_right(trajectories, limit=100):
        """Return one number per trajectory, in order."""
        return [
            float(trajectory.text.strip() == trajectory.prompt.answer) * (len(trajectory.text) <= limit)
            for trajectory in trajectories
        ]

Signature: `(trajectories: Sequence[app.types.Trajectory]) -> Sequence[float]`, or the same with `async def`. A class is
instantiated once per worker with `reward.args` and then called like the function, so it can hold a model, a compiled
pattern or a client. `trajectories` are completions of one prompt: all of them, if they are scored together. Useful
fields: `text` (without special tokens), `prompt.answer`, `prompt.source`, `prompt.token_ids`, `completion.token_ids`,
`completion.truncated`.

Rewards run in worker processes (`reward.workers`). A call that hangs is killed after `reward.timeout_s` per trajectory.
When a call raises, hangs or kills its worker, each of its trajectories is retried once, alone, so that only the
offending one fails; `reward/retried` counts them. A trajectory fails when its call raises, hangs, kills the worker, or
does not return one finite number per trajectory. A failed trajectory scores 0 and is counted (`reward/failed_*`); when
more than `reward.max_failed_fraction` of a step's trajectories fail, the run stops. Printed output goes to the log.
'''
