'''Rewards: what a completion earned.

Your own reward is a function that Python can import, named in the configuration:

    python -m app reward._target_=my_rewards.short_and_right +reward.args.limit=200

    # my_rewards.py, in the folder where the command is given or anywhere else on PYTHONPATH
    def short_and_right(trajectories, limit=100):
        """One number for each trajectory, in their order."""
        return [
            float(trajectory.text.strip() == trajectory.prompt.answer) * (len(trajectory.text) <= limit)
            for trajectory in trajectories
        ]

Signature: `(trajectories: Sequence[app.types.Trajectory]) -> Sequence[float]`, or the same with `async def`. A class is
made once with `reward.args` and then called like the function, so it can hold a model, a compiled pattern or a client.
`trajectories` are completions of one prompt, all of them where they were scored together. Of each you can use `text`
(without special tokens), `prompt.answer`, `prompt.source`, `prompt.token_ids`, `completion.token_ids`,
`completion.truncated`.

It runs in worker processes (`reward.workers`): a call that hangs is killed after `reward.timeout_s`. When a call raises
or hangs, each of its trajectories is tried once more alone, so that only the guilty one fails. A trajectory fails when
its call raises, hangs, kills the worker, or gives anything but one finite number for each trajectory. A failed
trajectory scores 0 and is counted (`reward/failed_*`); when more than `reward.max_failed_fraction` of a step's
trajectories fail, the run stops. Printing goes to stderr.
'''
