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

Signatures: see `app/reward/component.py`. Each may be `async def`. A class is instantiated once per worker with its
arguments and then called like the function, so it can hold a model, a compiled pattern or a client. Useful fields of a
trajectory: `text` (without special tokens), `prompt.question`, `prompt.messages`, `prompt.answer`, `prompt.row` (every
column), `prompt.source`, `completion.token_ids`, `completion.truncated`.

Each component runs in worker processes of its own (`reward_pool.py`); failed trajectories score 0 and are counted
(`scorer.py`). Failures and printed output go to `logs/reward.log`. Custom rewards are tried before a run starts.
'''
